"""Reports of an instance at one moment, read only as far as they are accessed.

Between two events the state of an instance can be computed afterwards, so a report that is never read costs
almost nothing. Before an instance changes, it makes its reports read everything (`read_all`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simulator.blocks import blocks_for
from simulator.cluster import LengthPredictor
from simulator.instance import Instance
from simulator.job import Job, JobState
from tailrace.perf.horizon import FutureLoad

# A job, its output tokens, its state, and its KV blocks; -1: as many as its context needs.
Row = tuple[Job, int, JobState, int]


class Report:
    """One instance at `at_s`. Call `read_counts` before using the other attributes; units are tokens unless
    named otherwise."""

    __slots__ = (
        "_by_job",
        "_counts_read",
        "_instance",
        "_rows",
        "at_s",
        "backlog",
        "boundary",
        "context",
        "decode_tokens",
        "decoding",
        "empty",
        "future",
        "host",
        "incoming_bytes_per_s",
        "kv_used",
        "placed_before",
        "prefill_s",
        "running",
        "token_interval_s",
        "waiting",
    )

    boundary: int
    # Requests with a batch slot, and requests waiting for one.
    running: int
    waiting: int
    kv_used: int
    context: int
    # The decoding batch: its requests, and the tokens of their contexts.
    decoding: int
    decode_tokens: int
    host: int
    # Mean over the last one to two seconds.
    token_interval_s: float
    # Prompt tokens not yet computed, and the seconds they take without the overhead of each step.
    backlog: int
    prefill_s: float
    # The worker's own simulation of its future load (ARES, section 5.2); None: not computed yet (`forecast`).
    future: tuple[float, ...] | None

    def __init__(self, instance: Instance, now: float, placed_before: int) -> None:
        self.at_s = now
        # Number of placements so far, all of which the report includes.
        self.placed_before = placed_before
        self.empty = instance.is_empty
        self.incoming_bytes_per_s = instance.incoming.bytes_per_s
        self._instance = instance
        self._counts_read = False
        self._rows: list[Row] | None = None
        self._by_job: dict[Job, Row] | None = None
        self.future = None

    @property
    def max_model_len(self) -> int:
        """Return the longest context that the engine accepts, in tokens."""
        return self._instance.spec.max_model_len

    def read_counts(self) -> None:
        """Read everything except the requests, if not read yet."""
        if self._counts_read:
            return
        self._counts_read = True
        instance = self._instance
        self.boundary = boundary = instance.boundary_at(self.at_s)
        size = instance.block_tokens
        self.decoding = len(instance.decoding)
        self.decode_tokens = instance.decode_tokens_at(boundary)
        self.running = self.decoding + len(instance.prefilling) + len(instance.paused)
        self.waiting = len(instance.waiting)
        self.kv_used = instance.used_blocks_at(boundary) * size
        self.context = self.decode_tokens + instance.idle_context
        self.host = instance.host_blocks * size
        self.token_interval_s = instance.token_interval_s(self.at_s)
        self.backlog = instance.backlog_at(boundary)
        self.prefill_s = instance.backlog_s_at(boundary) if self.backlog else 0.0

    def prefill_delay_s(self, more_tokens: int, more_s: float) -> float:
        """Return the seconds until all prompts are computed, including `more_tokens`, which take `more_s`."""
        backlog = self.backlog + more_tokens
        if not backlog:
            return 0.0
        step_s, budget = self._instance.prefill_overhead(self.decoding, self.decode_tokens)
        return self.prefill_s + more_s + -(-backlog // budget) * step_s

    def read_all(self) -> None:
        """Read everything: the instance is about to change."""
        assert self.rows is not None

    @property
    def rows(self) -> list[Row]:
        """Return the instance's requests."""
        if self._rows is None:
            self.read_counts()
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

    @property
    def by_job(self) -> Mapping[Job, Row]:
        """Return the instance's requests by job."""
        if self._by_job is None:
            self._by_job = {row[0]: row for row in self.rows}
        return self._by_job


def blocks_of(row: Row, block_tokens: int) -> int:
    """Return the KV blocks that a request of a report holds on the device."""
    job, tokens, state, blocks = row
    if blocks < 0:
        return blocks_for(job.prompt + tokens, block_tokens)
    return 0 if state is JobState.SWAPPED else blocks


def forecast(
    reports: Iterable[Report], load: FutureLoad, predictor: LengthPredictor | None, max_tokens: int
) -> None:
    """Compute the `future` of each report that has none, for all reports at once.

    `max_tokens` is the limit that requests state; predictions are bounded by what it leaves.
    """
    due = [report for report in reports if report.future is None]
    if not due:
        return
    tokens: list[int] = []
    remaining: list[float] = []
    counts: list[int] = []
    for report in due:
        rows = report.rows
        counts.append(len(rows))
        tokens += [job.prompt + generated for job, generated, _, _ in rows]
        longest = report.max_model_len
        for job, generated, _, _ in rows:
            # `tokens_left`, inlined: this runs for each request of each report.
            limit = max_tokens - generated
            room = longest - job.prompt - generated
            if room < limit:
                limit = room
            predicted = None if predictor is None else predictor.remaining(job.request, generated)
            if predicted is None or predicted > limit:
                predicted = limit if limit > 0 else 0.0
            remaining.append(predicted)
    for report, future in zip(due, load.of_each(tokens, remaining, counts), strict=True):
        report.future = future
