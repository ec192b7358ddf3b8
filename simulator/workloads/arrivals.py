"""When requests arrive: Poisson or in bursts, and workloads scaled, cut and merged.

Every function returns a new workload and leaves the given one as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.lengths import DrawLengths, Times


def poisson_times(count: int, rate_per_s: float, rng: np.random.Generator) -> Times:
    """The first `count` arrivals of a Poisson process, in seconds. Raises WorkloadError for no rate."""
    check_rate(count, rate_per_s)
    times: Times = rng.standard_exponential(count).cumsum() / rate_per_s
    return times


def gamma_times(count: int, rate_per_s: float, rng: np.random.Generator, variation: float) -> Times:
    """The first `count` arrivals, in seconds, with gamma distributed times between them.

    `variation`: their coefficient of variation, above zero; 1: Poisson. Raises WorkloadError for no rate.
    """
    check_rate(count, rate_per_s)
    shape = variation**-2
    times: Times = rng.standard_gamma(shape, count).cumsum() / (shape * rate_per_s)
    return times


def check_rate(count: int, rate_per_s: float) -> None:
    """Raises WorkloadError for no requests or no rate."""
    if not rate_per_s > 0.0 or not np.isfinite(rate_per_s):
        raise WorkloadError(f"the rate must be a number above zero, not {rate_per_s}")
    if count < 1:
        raise WorkloadError(f"a workload needs at least one request, not {count}")


def poisson_requests(
    name: str, draw: DrawLengths, count: int, rate_per_s: float, seed: int
) -> list[SimRequest]:
    """`count` requests with lengths from `draw`, arriving at `rate_per_s`, called `name`-0, `name`-1, ...

    Lengths and times come from two streams of `seed`: at another rate the same requests arrive in the same
    order, only closer together, which is what a comparison of rates wants.
    """
    lengths_rng, times_rng = _streams(seed)
    times = poisson_times(count, rate_per_s, times_rng)
    return draw(count, lengths_rng).requests(times, name)


def gamma_requests(
    name: str, draw: DrawLengths, count: int, rate_per_s: float, seed: int, variation: float
) -> list[SimRequest]:
    """As `poisson_requests`, with arrivals as in `gamma_times`."""
    lengths_rng, times_rng = _streams(seed)
    times = gamma_times(count, rate_per_s, times_rng, variation)
    return draw(count, lengths_rng).requests(times, name)


def _streams(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Of lengths and of times."""
    lengths_seed, times_seed = np.random.SeedSequence(seed).spawn(2)
    return np.random.default_rng(lengths_seed), np.random.default_rng(times_seed)


def mean_rate_per_s(requests: Sequence[SimRequest]) -> float:
    """Mean rate from the first to the last arrival. Raises WorkloadError if that is one moment."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0.0:
        raise WorkloadError(f"{len(requests)} request(s) at one moment have no rate that could be scaled")
    return (len(requests) - 1) / span_s


def scaled(workload: Workload, speed: float) -> Workload:
    """Time runs `speed` times as fast: arrivals at `speed` times the rate, with the same pattern."""
    if not speed > 0.0 or not np.isfinite(speed):
        raise WorkloadError(f"the speed must be a number above zero, not {speed}")
    requests = [replace(request, arrival_s=request.arrival_s / speed) for request in workload.requests]
    return Workload(workload.name, requests, f"{workload.source}; time {speed:.6g} times as fast")


def at_rate(workload: Workload, rate_per_s: float) -> Workload:
    """Scaled so that the mean rate is `rate_per_s`; the pattern of arrivals stays."""
    return scaled(workload, rate_per_s / mean_rate_per_s(workload.requests))


def clipped(workload: Workload, clip: Clip) -> Workload:
    """The part of it that `clip` asks for. Raises WorkloadError when nothing is in it."""
    requests = clip.cut(workload.requests)
    if not requests:
        raise WorkloadError(f"{workload.name}: no requests{clip.words()}")
    return Workload(workload.name, requests, workload.source + clip.words())


def merged(name: str, workloads: Sequence[Workload]) -> Workload:
    """All requests of `workloads` in one stream, in the order of arrival.

    Ids become `<position>/<id>`, so that they are distinct whatever they were: position 0 is the first of
    `workloads`. Of two that arrive at one moment, that of the earlier workload comes first.
    """
    if not workloads:
        raise WorkloadError("nothing to merge")
    together = [
        replace(
            request,
            request_id=f"{position}/{request.request_id}",
            # Names are those of their workload.
            unit_names=tuple(name | position << 48 for name in request.unit_names),
        )
        for position, workload in enumerate(workloads)
        for request in workload.requests
    ]
    together.sort(key=lambda request: request.arrival_s)
    return Workload(name, together, " + ".join(workload.source for workload in workloads))
