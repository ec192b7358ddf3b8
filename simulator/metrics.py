"""Turn finished jobs into records.

A job has only a few runs of tokens, so the gaps of many jobs are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from simulator.instance import Instance
from simulator.job import Job
from simulator.records import PoolChange, RequestRecord, Series, StageChange
from simulator.steplog import TokenTimes, last_s
from tailrace.cluster import Stage
from tailrace.qoe import TokenRun, qoe

# Length of the parts of a run whose interval is treated as constant when the pacer may run dry: with a growth
# of a microsecond per step, token times are then off by less than a tenth of a millisecond.
_EVEN_RUN_TOKENS: Final = 32
# Jobs whose gaps are computed together.
_JOBS_PER_BATCH: Final = 512


class CompletedJobs:
    """Collect finished and refused jobs, and make their records."""

    def __init__(self, tpot_target_s: float) -> None:
        """Start without jobs. `tpot_target_s` is the reading pace for QoE."""
        # An attribute, since it is read after each event of a simulation.
        self.count = 0
        self._tpot_target_s = tpot_target_s
        self._records: dict[str, RequestRecord] = {}
        # Jobs without records yet: all, their answering tokens one job after the other, and where each job's
        # begin.
        self._jobs: list[Job] = []
        self._times = TokenTimes()
        self._timed: list[Job] = []
        self._begins: list[int] = []

    def add(self, job: Job) -> None:
        """Add a job that has finished or was refused, and will not change any more."""
        self.count += 1
        self._jobs.append(job)
        if job.finish_s is not None and job.first_answer_s is not None and job.request.answer_tokens > 1:
            self._timed.append(job)
            self._begins.append(len(self._times))
            job.copy_times(job.request.reasoning_tokens, self._times)
        # The steps are no longer needed.
        job.history = []
        if len(self._jobs) >= _JOBS_PER_BATCH:
            self._record()

    def records(self) -> dict[str, RequestRecord]:
        """Return the records by request id."""
        self._record()
        return self._records

    def _record(self) -> None:
        qualities: dict[Job, float] = {}
        if self._timed:
            qualities = _qualities(self._timed, self._begins, self._times, self._tpot_target_s)
        for job in self._jobs:
            self._records[job.request.request_id] = _record_of(job, qualities.get(job, 1.0))
        self._jobs, self._timed, self._begins, self._times = [], [], [], TokenTimes()


def _record_of(job: Job, answer_qoe: float) -> RequestRecord:
    request = job.request
    ttfat_s = tpot = quality = None
    if job.finish_s is not None and job.first_answer_s is not None:
        ttfat_s = job.first_answer_s - request.arrival_s
        quality = answer_qoe
        tpot = 0.0
        if request.answer_tokens > 1:
            tpot = (job.finish_s - job.first_answer_s) / (request.answer_tokens - 1)
    return RequestRecord(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        reasoning_tokens=request.reasoning_tokens,
        answer_tokens=request.answer_tokens,
        refused=job.refused,
        placements=tuple(job.placements),
        first_token_s=job.first_token_s,
        first_answer_s=job.first_answer_s,
        finish_s=job.finish_s,
        ttft_s=ttfat_s,
        tpot_s=tpot,
        qoe=quality,
        migrations=job.migrations,
        pause_s=job.pause_s,
        preemptions_swapped=job.swapped,
        preemptions_recomputed=job.recomputed,
        answer_blocking_s=job.blocking_s,
        queue_s=job.queue_s,
        cached_tokens=job.cached or 0,
        loaded_tokens=job.loaded,
    )


def _qualities(
    jobs: list[Job], begins: list[int], times: TokenTimes, tpot_target_s: float
) -> dict[Job, float]:
    """Compute each job's QoE. Its runs start at its entry in `begins`; it has more than one token."""
    first_s, interval_s, increment_s, counts = times.columns()
    starts = np.array(begins)
    # From the last token of the run before; there is no gap between jobs.
    before_s = np.zeros(len(first_s))
    before_s[1:] = first_s[1:] - last_s(first_s, interval_s, increment_s, counts)[:-1]
    before_s[starts] = 0.0
    within_last_s = interval_s + increment_s * np.maximum(counts - 2, 0)
    largest_s = np.where(counts > 1, np.maximum(interval_s, within_last_s), 0.0)
    max_s = np.maximum.reduceat(np.maximum(largest_s, before_s), starts)
    qualities: dict[Job, float] = {}
    spans = pairwise([*begins, len(times)])
    for job, max_gap_s, span in zip(jobs, max_s.tolist(), spans, strict=True):
        slow = max_gap_s > tpot_target_s
        qualities[job] = qoe(_runs(times, *span), tpot_target_s) if slow else 1.0
    return qualities


def _runs(times: TokenTimes, begin: int, end: int) -> list[TokenRun]:
    runs: list[TokenRun] = []
    columns = (times.first_s, times.interval_s, times.increment_s, times.counts)
    for first_s, interval_s, increment_s, count in zip(*(c[begin:end] for c in columns), strict=True):
        done = 0
        while done < count:
            # Without growth, and while tokens come faster than the user reads, the spacing does not matter.
            part = min(count - done, _EVEN_RUN_TOKENS if increment_s else count)
            start = first_s + interval_s * done + increment_s * (done * (done - 1) / 2)
            mean = interval_s + increment_s * (done + (part - 2) / 2) if part > 1 else 0.0
            runs.append(TokenRun(start, mean, part))
            done += part
    return runs


class Sampler:
    """Collect samples, each a row with a column per instance."""

    def __init__(self, instances: Sequence[Instance], stages: tuple[Stage, ...]) -> None:
        self._instances = instances
        self._times: list[float] = []
        self._rows: list[list[tuple[int, int, int, int, int, float]]] = []
        self._pools = [PoolChange(0.0, i.instance_id, i.pool) for i in instances]
        self._stages = [StageChange(0.0, stages)]

    def sample(self, now: float) -> None:
        """Take a sample of every instance."""
        self._times.append(now)
        self._rows.append([_sample(instance, now) for instance in self._instances])

    def pool_changed(self, instance: Instance, now: float) -> None:
        """Record the pool to which an instance was moved."""
        self._pools.append(PoolChange(now, instance.instance_id, instance.pool))

    def stages_changed(self, stages: tuple[Stage, ...], now: float) -> None:
        """Record a change of the stages."""
        self._stages.append(StageChange(now, stages))

    def series(self) -> Series:
        """Return all samples."""
        shape = (len(self._times), len(self._instances), 6)
        rows = np.array(self._rows, np.float64).reshape(shape)
        counts = rows.astype(np.int64)
        return Series(
            instance_ids=tuple(i.instance_id for i in self._instances),
            times_s=np.array(self._times, np.float64),
            kv_used_tokens=counts[:, :, 0],
            host_kv_tokens=counts[:, :, 1],
            decoding=counts[:, :, 2],
            prefilling=counts[:, :, 3],
            waiting=counts[:, :, 4],
            step_s=rows[:, :, 5],
            pools=tuple(self._pools),
            stages=tuple(self._stages),
        )


def _sample(instance: Instance, now: float) -> tuple[int, int, int, int, int, float]:
    size = instance.block_tokens
    return (
        instance.used_blocks_at(instance.boundary_at(now)) * size,
        instance.host_blocks * size,
        len(instance.decoding),
        len(instance.prefilling),
        len(instance.waiting) + len(instance.paused),
        instance.step_s,
    )
