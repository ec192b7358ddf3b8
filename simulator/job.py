"""The state of a request inside the simulator."""

from __future__ import annotations

import enum

from simulator.events import NEVER
from simulator.records import PlacementRecord
from simulator.request import SimRequest
from simulator.steplog import StepLog, TokenTimes
from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank


class JobState(enum.Enum):
    """Where a job's KV is and how it is being processed."""

    # No KV on the device: new, or to be recomputed.
    QUEUED = "queued"
    # KV in host memory.
    SWAPPED = "swapped"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    # Held back for the last round of its migration, or for its first step on the target.
    PAUSED = "paused"
    DONE = "done"


class Job:
    """Mutable state of one request. `tokens` is exact except while decoding: then use `tokens_at`."""

    __slots__ = (
        "blocking_s",
        "blocks",
        "boundary_tokens",
        "cached",
        "demoted",
        "demotion_since",
        "demotion_until",
        "expected_cached",
        "finish_s",
        "first_answer_s",
        "first_token_s",
        "held_names",
        "history",
        "instance_id",
        "joined",
        "lapsed",
        "loaded",
        "migrating",
        "migrations",
        "on_offer",
        "order",
        "passed_blocks",
        "pause_s",
        "placements",
        "prefill_done",
        "prefill_total",
        "prompt",
        "queue_s",
        "rank",
        "rank_until",
        "reasoning",
        "reasoning_end_s",
        "recomputed",
        "refused",
        "request",
        "residue",
        "state",
        "swapped",
        "tokens",
        "total",
        "version",
        "work_ahead_s",
    )

    def __init__(self, request: SimRequest, order: int) -> None:
        self.request = request
        self.order = order
        self.prompt = request.prompt_tokens
        self.reasoning = request.reasoning_tokens
        self.total = request.output_tokens
        self.state = JobState.QUEUED
        # Empty: not placed yet.
        self.instance_id = ""
        # Whether a migration is open (Migrations.find).
        self.migrating = False
        # Whether its instance has offered it to others.
        self.on_offer = False
        # Output tokens at boundary `joined` of its instance.
        self.tokens = 0
        self.joined = 0
        # (context - boundary) mod block size: constant while decoding.
        self.residue = 0
        # Counts changes of `tokens` and `joined`, to recognize stale milestones.
        self.version = 0
        # Blocks held while not decoding (on the device, or on the host if swapped out).
        self.blocks = 0
        # As in `tailrace.intra.allocate.Claim`.
        self.passed_blocks = 0
        self.prefill_done = 0
        self.prefill_total = self.prompt
        # Named units that it holds, in order; tokens found in a cache at its first admission (None: not
        # admitted yet), the part of them loaded from host memory, and the tokens that its placement expected
        # to find.
        self.held_names: list[int] = []
        self.cached: int | None = None
        self.loaded = 0
        self.expected_cached = 0
        self.rank: Rank = ()
        # Output tokens from which `rank` may change.
        self.rank_until = 0
        self.lapsed = False
        # Whether it is demoted, valid for this range of output tokens.
        self.demoted = False
        self.demotion_since = 0
        self.demotion_until = 0
        # Output tokens at which its context outgrows its instance's stage.
        self.boundary_tokens = NEVER
        # (log, start, end) of the boundaries between which it decoded.
        self.history: list[tuple[StepLog, int, int]] = []
        self.placements: list[PlacementRecord] = []
        self.refused = ""
        # Work queued on its instance when it arrived there (JobView.queue_s).
        self.work_ahead_s = 0.0
        self.queue_s: float | None = None
        self.first_token_s: float | None = None
        self.reasoning_end_s: float | None = None
        self.first_answer_s: float | None = None
        self.blocking_s: float | None = None
        self.finish_s: float | None = None
        self.migrations = 0
        self.pause_s = 0.0
        self.swapped = 0
        self.recomputed = 0

    def tokens_at(self, boundary: int) -> int:
        """Return the output tokens at a boundary of its instance."""
        return self.tokens + (boundary - self.joined) if self.state is JobState.DECODING else self.tokens

    def phase_of(self, tokens: int) -> Phase:
        """Return the phase after this many output tokens."""
        if not tokens:
            return Phase.PREFILL
        return Phase.REASONING if tokens < self.reasoning else Phase.ANSWERING

    def view(self, tokens: int) -> JobView:
        """Return what the order inside the instance may see of the job."""
        phase = self.phase_of(tokens)
        in_phase = tokens - self.reasoning if phase is Phase.ANSWERING else tokens
        arrived_s = self.request.arrival_s
        return JobView(
            self.order,
            phase,
            self.prompt,
            tokens,
            in_phase,
            arrived_s,
            self.work_ahead_s,
            self.answering_s,
            self.lapsed,
        )

    @property
    def answering_s(self) -> float:
        """Return when it began to answer, in seconds; meaningless before."""
        return (self.reasoning_end_s if self.reasoning else self.first_token_s) or 0.0

    def rank_at(self, tokens: int, intra: IntraPolicy) -> Rank:
        """Return the rank; the policy is asked only when it may have changed."""
        if tokens >= self.rank_until:
            view = self.view(tokens)
            self.rank = intra.rank(view)
            holds = intra.rank_holds(view)
            self.rank_until = NEVER if holds is None else tokens + holds
        return self.rank

    def next_milestone(self, tokens: int) -> int:
        """Return the output tokens at which the next event occurs if it keeps decoding."""
        reasoning = self.reasoning
        if tokens < reasoning:
            milestone = reasoning
        elif tokens == reasoning and self.first_answer_s is None:
            milestone = reasoning + 1
        else:
            milestone = self.total
        boundary = self.boundary_tokens
        return boundary if tokens < boundary < milestone else milestone

    def record_decoding(self, log: StepLog, start: int, end: int) -> None:
        """Record that it produced a token in each step between these boundaries."""
        if end <= start:
            return
        if self.history:
            last_log, last_start, last_end = self.history[-1]
            if last_log is log and last_end == start:
                self.history[-1] = (log, last_start, end)
                return
        self.history.append((log, start, end))

    def copy_times(self, skip: int, to: TokenTimes) -> None:
        """Append its token times without the first `skip`."""
        for log, start, end in self.history:
            begin = start + skip
            if begin < end:
                log.copy(begin, end, to)
            skip = max(0, begin - end)
