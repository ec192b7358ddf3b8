"""What one instance reports at one moment, looked at only as far as somebody asks.

Between two events an instance changes in no way that cannot be computed afterwards, so a report that nobody
reads costs next to nothing. An instance that is about to change lets its reports look first (`take_down`).
"""

from __future__ import annotations

from simulator.hooks import FutureLoad, LengthPredictor
from simulator.instance import Instance
from simulator.job import Job, JobState

# A job, its output tokens, its state, and its KV blocks; -1: what its context needs.
Row = tuple[Job, int, JobState, int]


class Report:
    """One instance at `at_s`. Read `look()` before the other attributes; tokens unless named otherwise."""

    __slots__ = (
        "_future",
        "_instance",
        "_looked",
        "_rows",
        "at_s",
        "backlog",
        "boundary",
        "budget",
        "context",
        "empty",
        "host",
        "kv_used",
        "placed_before",
        "prefill_s",
        "prefill_step_s",
        "running",
        "step_s",
        "waiting",
    )

    boundary: int
    # Requests with a seat, and those that wait for one.
    running: int
    waiting: int
    kv_used: int
    context: int
    host: int
    # Seconds of the last step begun.
    step_s: float
    # Prompt tokens not computed yet; seconds that they take, and seconds that each step takes besides.
    backlog: int
    prefill_s: float
    prefill_step_s: float
    # Prompt tokens of one step.
    budget: int

    def __init__(self, instance: Instance, now: float, placed_before: int) -> None:
        self.at_s = now
        # Placements counted so far: those are in the report.
        self.placed_before = placed_before
        self.empty = instance.is_empty
        self._instance = instance
        self._looked = False
        self._rows: list[Row] | None = None
        self._future: tuple[float, ...] | None = None

    def look(self) -> None:
        """Read everything but the requests off the instance, once."""
        if self._looked:
            return
        self._looked = True
        instance = self._instance
        self.boundary = boundary = instance.begun_boundary(self.at_s)
        size = instance.block_tokens
        self.running = len(instance.decoding) + len(instance.prefilling) + len(instance.paused)
        self.waiting = len(instance.waiting)
        self.kv_used = instance.used_blocks_at(boundary) * size
        self.context = instance.context_at(boundary)
        self.host = instance.host_blocks * size
        self.step_s = instance.step_s
        self.backlog = instance.backlog_at(boundary)
        self.prefill_s = instance.backlog_s_at(boundary) if self.backlog else 0.0
        self.prefill_step_s, self.budget = instance.beside_prefill(boundary)

    def take_down(self) -> None:
        """Look at everything: the instance is about to change."""
        assert self.rows is not None

    @property
    def rows(self) -> list[Row]:
        """Its requests."""
        if self._rows is None:
            self.look()
            instance, boundary, decoding = self._instance, self.boundary, JobState.DECODING
            rows: list[Row] = [
                (job, job.tokens + boundary - job.joined, decoding, -1) for job in instance.decoding
            ]
            if instance.paused:
                rows += [(job, job.tokens, job.state, job.blocks) for job in instance.paused]
            if instance.prefilling:
                rows += [(job, job.tokens, job.state, job.blocks) for _, job in instance.prefilling]
            if instance.waiting:
                rows += [(job, job.tokens, job.state, job.blocks) for _, job in instance.waiting]
            self._rows = rows
        return self._rows

    def future(self, load: FutureLoad, predictor: LengthPredictor | None) -> tuple[float, ...]:
        """The worker's own simulation of its coming load (ARES, section 5.2), done once."""
        if self._future is None:
            if predictor is None:
                pairs: list[tuple[int, float | None]] = [(row[0].prompt + row[1], None) for row in self.rows]
            else:
                remaining = predictor.remaining
                pairs = [
                    (job.prompt + tokens, remaining(job.request, tokens)) for job, tokens, _, _ in self.rows
                ]
            self._future = load(pairs)
        return self._future
