"""Compute the errors of a simulated run against the recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.validation.recorded import RecordedRequest


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """One request, recorded and simulated, in seconds. TPOT is None for an output of one token."""

    request_id: str
    ttft_s: float
    simulated_ttft_s: float
    tpot_s: float | None
    simulated_tpot_s: float | None
    latency_s: float
    simulated_latency_s: float


@dataclass(frozen=True, slots=True)
class MetricError:
    """The error of one metric. Errors are shares: 0.01 is one percent."""

    requests: int
    mean_s: float
    simulated_mean_s: float
    # Error of the mean: positive if the simulator is slower.
    mean_error: float
    # Absolute error per request: mean (MAPE), median, 90th percentile.
    mape: float
    p50_error: float
    p90_error: float
    # Error of the 99th percentile over requests.
    p99_of_metric_error: float


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one run."""

    ttft: MetricError
    tpot: MetricError
    latency: MetricError


def compare(request: RecordedRequest, first_token_s: float, finish_s: float) -> ComparedRequest:
    """Compare a request with its simulated first and last token."""
    gaps = request.output_tokens - 1
    recorded_s = request.finish_s - request.first_token_s
    return ComparedRequest(
        request_id=request.request_id,
        ttft_s=request.first_token_s - request.arrival_s,
        simulated_ttft_s=first_token_s - request.arrival_s,
        tpot_s=recorded_s / gaps if gaps else None,
        simulated_tpot_s=(finish_s - first_token_s) / gaps if gaps else None,
        latency_s=request.finish_s - request.arrival_s,
        simulated_latency_s=finish_s - request.arrival_s,
    )


def errors(requests: Sequence[ComparedRequest]) -> Errors:
    """Compute the errors over all requests, at least one of which must have several output tokens."""
    tpots = [
        (request.tpot_s, request.simulated_tpot_s)
        for request in requests
        if request.tpot_s is not None and request.simulated_tpot_s is not None
    ]
    return Errors(
        ttft=metric_error([(request.ttft_s, request.simulated_ttft_s) for request in requests]),
        tpot=metric_error(tpots),
        latency=metric_error([(request.latency_s, request.simulated_latency_s) for request in requests]),
    )


def metric_error(pairs: Sequence[tuple[float, float]]) -> MetricError:
    """Compute the error over (recorded, simulated) seconds. Raise ValueError if there are none."""
    if not pairs:
        raise ValueError("there is nothing to compare")
    recorded, simulated = np.array(pairs, np.float64).T
    absolute = np.abs(simulated / recorded - 1.0)
    mean, simulated_mean = float(recorded.mean()), float(simulated.mean())
    p99 = float(np.quantile(simulated, 0.99) / np.quantile(recorded, 0.99))
    return MetricError(
        requests=len(pairs),
        mean_s=mean,
        simulated_mean_s=simulated_mean,
        mean_error=simulated_mean / mean - 1.0,
        mape=float(absolute.mean()),
        p50_error=float(np.median(absolute)),
        p90_error=float(np.quantile(absolute, 0.9)),
        p99_of_metric_error=p99 - 1.0,
    )
