"""A request inside the simulator."""

from __future__ import annotations

import enum

from simulator.events import NEVER
from simulator.records import PlacementRecord
from simulator.request import SimRequest
from simulator.steplog import StepLog, TokenTimes
from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank


class JobState(enum.Enum):
    """Where a job's KV is and what is being done with it."""

    # No KV on the device: new, or to be computed anew.
    QUEUED = "queued"
    # KV in host memory.
    SWAPPED = "swapped"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    # Held back for the last round of its migration, or for its first step on the target.
    PAUSED = "paused"
    DONE = "done"


class Job:
    """Mutable state of one request. `tokens` is exact except while decoding: then see `tokens_at`."""

    __slots__ = (
        "blocking_s",
        "blocks",
        "boundary_tokens",
        "cached",
        "demoted",
        "demotion_since",
        "demotion_until",
        "finish_s",
        "first_answer_s",
        "first_token_s",
        "found_s",
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
        "told_cached",
        "total",
        "version",
    )

    def __init__(self, request: SimRequest, order: int) -> None:
        self.request = request
        self.order = order
        self.prompt = request.prompt_tokens
        self.reasoning = request.reasoning_tokens
        self.total = request.output_tokens
        self.state = JobState.QUEUED
        # Empty: it has not been placed.
        self.instance_id = ""
        # A migration of it is open (Migrations.of).
        self.migrating = False
        # Its instance looks for somebody to take it over.
        self.on_offer = False
        # Output tokens, at boundary `joined` of its instance.
        self.tokens = 0
        self.joined = 0
        # (context - boundary) mod block size: constant while decoding.
        self.residue = 0
        # Counts the times that `tokens`/`joined` were set: tells a stale milestone.
        self.version = 0
        # Blocks held while not decoding (device, or host if swapped).
        self.blocks = 0
        # As `tailrace.intra.allocate.Claim` has it.
        self.passed_blocks = 0
        self.prefill_done = 0
        self.prefill_total = self.prompt
        # Units of its KV that it holds by name, in order; tokens that it found when it first began (None: it
        # has not), and of them those that were loaded from host memory; and those that its placement counted
        # on.
        self.held_names: list[int] = []
        self.cached: int | None = None
        self.loaded = 0
        self.told_cached = 0
        self.rank: Rank = ()
        # Output tokens up to which `rank` holds.
        self.rank_until = 0
        self.lapsed = False
        # Whether it is demoted, from so many output tokens on and up to (not including) so many.
        self.demoted = False
        self.demotion_since = 0
        self.demotion_until = 0
        # Output tokens at which it outgrows its instance's stage.
        self.boundary_tokens = NEVER
        # (log, start, end): it decoded between these boundaries.
        self.history: list[tuple[StepLog, int, int]] = []
        self.placements: list[PlacementRecord] = []
        self.refused = ""
        # What was left to compute on its instance when it came there (JobView.queue_s).
        self.found_s = 0.0
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
        """Output tokens made up to a boundary of its instance."""
        return self.tokens + (boundary - self.joined) if self.state is JobState.DECODING else self.tokens

    def phase_of(self, tokens: int) -> Phase:
        """Phase when it has made this many output tokens."""
        if not tokens:
            return Phase.PREFILL
        return Phase.REASONING if tokens < self.reasoning else Phase.ANSWERING

    def view(self, tokens: int) -> JobView:
        """What the intra-instance policy sees."""
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
            self.found_s,
            self.answering_s,
            self.lapsed,
        )

    @property
    def answering_s(self) -> float:
        """When it began to answer; of no meaning before."""
        return (self.reasoning_end_s if self.reasoning else self.first_token_s) or 0.0

    def rank_at(self, tokens: int, intra: IntraPolicy) -> Rank:
        """Its rank, asked anew only when it may have changed."""
        if tokens >= self.rank_until:
            view = self.view(tokens)
            self.rank = intra.rank(view)
            holds = intra.rank_holds(view)
            self.rank_until = NEVER if holds is None else tokens + holds
        return self.rank

    def next_milestone(self, tokens: int) -> int:
        """Output tokens at which something next happens to it, given that it goes on decoding."""
        reasoning = self.reasoning
        if tokens < reasoning:
            milestone = reasoning
        elif tokens == reasoning and self.first_answer_s is None:
            milestone = reasoning + 1
        else:
            milestone = self.total
        boundary = self.boundary_tokens
        return boundary if tokens < boundary < milestone else milestone

    def decoded(self, log: StepLog, start: int, end: int) -> None:
        """It made a token in each step between these boundaries."""
        if end <= start:
            return
        if self.history:
            last_log, last_start, last_end = self.history[-1]
            if last_log is log and last_end == start:
                self.history[-1] = (log, last_start, end)
                return
        self.history.append((log, start, end))

    def copy_times(self, skip: int, to: TokenTimes) -> None:
        """Append the times of its tokens without the first `skip`."""
        for log, start, end in self.history:
            begin = start + skip
            if begin < end:
                log.copy(begin, end, to)
            skip = max(0, begin - end)
