"""From a finished job to its record."""

from __future__ import annotations

import numpy as np

from simulator.job import Job
from simulator.records import RequestRecord
from simulator.steplog import Floats, TokenTimes
from tailrace.qoe import TokenRun, qoe

# Tokens of a run whose interval is taken as constant where the pacer may run dry: at a growth of a
# microsecond a step, token times are then off by less than a tenth of a millisecond.
_EVEN_TOKENS = 32


def record_of(job: Job, tpot_target_s: float) -> RequestRecord:
    """The job as a record; `tpot_target_s` is the pace that QoE goes by."""
    request = job.request
    answer = tpot = quality = gap_p99 = gap_max = None
    if job.finish_s is not None and job.first_answer_s is not None:
        answer = job.first_answer_s - request.arrival_s
        quality, gap_p99, gap_max = 1.0, 0.0, 0.0
        tpot = 0.0
        if request.answer_tokens > 1:
            tpot = (job.finish_s - job.first_answer_s) / (request.answer_tokens - 1)
            times = job.token_times(request.reasoning_tokens)
            between = _gaps_between(times)
            within_last = times.interval_s + times.increment_s * np.maximum(times.counts - 2, 0)
            inner = times.counts > 1
            largest = np.where(inner, np.maximum(times.interval_s, within_last), 0.0)
            gap_max = float(max(largest.max(), between.max(initial=0.0)))
            gaps = request.answer_tokens - 1
            # Of fewer than a hundred the 99th percentile is the last.
            gap_p99 = gap_max if gaps < 100 else _weighted_p99(times, between, gaps)
            if gap_max > tpot_target_s:
                quality = qoe(_runs(times), tpot_target_s)
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
        ttft_s=answer,
        tpot_s=tpot,
        qoe=quality,
        gap_p99_s=gap_p99,
        gap_max_s=gap_max,
        migrations=job.migrations,
        pause_s=job.pause_s,
        preemptions_swapped=job.swapped,
        preemptions_recomputed=job.recomputed,
        answer_blocking_s=job.blocking_s,
        queue_s=job.queue_s,
    )


def _gaps_between(times: TokenTimes) -> Floats:
    """From the last token of each run to the first of the next."""
    gaps: Floats = times.first_s[1:] - times.last_s[:-1]
    return gaps


def _weighted_p99(times: TokenTimes, between: Floats, gaps: int) -> float:
    """99th percentile of the time between tokens; the gaps within a run count at their mean."""
    inner = times.counts - 1
    mean = times.interval_s + times.increment_s * (np.maximum(inner - 1, 0) / 2)
    values = np.concatenate([mean, between])
    weights = np.concatenate([inner, np.ones(len(between), np.int64)])
    order = values.argsort()
    reached = weights[order].cumsum()
    index = int(reached.searchsorted(0.99 * gaps, "left"))
    return float(values[order[min(index, len(order) - 1)]])


def _runs(times: TokenTimes) -> list[TokenRun]:
    runs: list[TokenRun] = []
    columns = (times.first_s, times.interval_s, times.increment_s, times.counts)
    for first_s, interval_s, increment_s, count in zip(*(c.tolist() for c in columns), strict=True):
        done = 0
        while done < count:
            # Without growth, and while the user reads slower than tokens come, the spacing does not matter.
            part = min(count - done, _EVEN_TOKENS if increment_s else count)
            start = first_s + interval_s * done + increment_s * (done * (done - 1) / 2)
            mean = interval_s + increment_s * (done + (part - 2) / 2) if part > 1 else 0.0
            runs.append(TokenRun(start, mean, part))
            done += part
    return runs
