"""Arrival times, Poisson or in bursts, and workloads scaled, cut and merged.

Every function returns a new workload and leaves its argument unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.lengths import DrawLengths, Times


def poisson_times(count: int, rate_per_s: float, rng: np.random.Generator) -> Times:
    """Draw the first `count` arrivals of a Poisson process, in seconds. Raise WorkloadError for an invalid
    rate."""
    check_rate(count, rate_per_s)
    times: Times = rng.standard_exponential(count).cumsum() / rate_per_s
    return times


def gamma_times(count: int, rate_per_s: float, rng: np.random.Generator, variation: float) -> Times:
    """Draw the first `count` arrivals, in seconds, with gamma distributed times between them.

    `variation` is their coefficient of variation, above zero; 1 is a Poisson process. Raise WorkloadError for
    an invalid rate.
    """
    check_rate(count, rate_per_s)
    shape = variation**-2
    times: Times = rng.standard_gamma(shape, count).cumsum() / (shape * rate_per_s)
    return times


def check_rate(count: int, rate_per_s: float) -> None:
    """Raise WorkloadError for an invalid rate or number of requests."""
    if not rate_per_s > 0.0 or not np.isfinite(rate_per_s):
        raise WorkloadError(f"the rate must be a number above zero, not {rate_per_s}")
    if count < 1:
        raise WorkloadError(f"a workload needs at least one request, not {count}")


def poisson_requests(
    name: str, draw: DrawLengths, count: int, rate_per_s: float, seed: int
) -> list[SimRequest]:
    """Generate `count` requests with lengths from `draw`, arriving at `rate_per_s`: `name`-0, `name`-1, ...

    Lengths and times come from two streams of `seed`, so at another rate the same requests arrive in the same
    order, only closer together, as comparisons of rates require.
    """
    lengths_rng, times_rng = _streams(seed)
    times = poisson_times(count, rate_per_s, times_rng)
    return draw(count, lengths_rng).requests(times, name)


def gamma_requests(
    name: str, draw: DrawLengths, count: int, rate_per_s: float, seed: int, variation: float
) -> list[SimRequest]:
    """Generate requests like `poisson_requests`, with arrivals of `gamma_times`."""
    lengths_rng, times_rng = _streams(seed)
    times = gamma_times(count, rate_per_s, times_rng, variation)
    return draw(count, lengths_rng).requests(times, name)


def _streams(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Return the random streams of lengths and of times."""
    lengths_seed, times_seed = np.random.SeedSequence(seed).spawn(2)
    return np.random.default_rng(lengths_seed), np.random.default_rng(times_seed)


def mean_rate_per_s(requests: Sequence[SimRequest]) -> float:
    """Return the mean rate from the first to the last arrival. Raise WorkloadError if all arrive at one
    moment."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0.0:
        raise WorkloadError(f"{len(requests)} request(s) at one moment have no rate that could be scaled")
    return (len(requests) - 1) / span_s


def scaled(workload: Workload, speed: float) -> Workload:
    """Speed time up by a factor: the rate is multiplied, the pattern of arrivals stays."""
    if not speed > 0.0 or not np.isfinite(speed):
        raise WorkloadError(f"the speed must be a number above zero, not {speed}")
    requests = [replace(request, arrival_s=request.arrival_s / speed) for request in workload.requests]
    return Workload(workload.name, requests, f"{workload.source}; time {speed:.6g} times as fast")


def at_rate(workload: Workload, rate_per_s: float) -> Workload:
    """Scale time so that the mean rate is `rate_per_s`; the pattern of arrivals stays."""
    return scaled(workload, rate_per_s / mean_rate_per_s(workload.requests))


def shuffled(workload: Workload, seed: int) -> Workload:
    """Pair the arrivals and the requests anew: the same times and the same lengths, in another order."""
    requests = workload.requests
    order = np.random.default_rng(seed).permutation(len(requests))
    paired = [
        replace(requests[at], arrival_s=request.arrival_s)
        for at, request in zip(order, requests, strict=True)
    ]
    return Workload(workload.name, paired, f"{workload.source}; shuffled with seed {seed}")


def clipped(workload: Workload, clip: Clip) -> Workload:
    """Return the part of the workload selected by `clip`. Raise WorkloadError if it is empty."""
    requests = clip.cut(workload.requests)
    if not requests:
        raise WorkloadError(f"{workload.name}: no requests{clip.describe()}")
    return Workload(workload.name, requests, workload.source + clip.describe())


def merged(name: str, workloads: Sequence[Workload]) -> Workload:
    """Merge the requests of `workloads` in the order of arrival.

    Ids become `<position>/<id>`, so that they are distinct; position 0 is the first of `workloads`. Of two
    requests that arrive at one moment, that of the earlier workload comes first.
    """
    if not workloads:
        raise WorkloadError("nothing to merge")
    together = [
        replace(
            request,
            request_id=f"{position}/{request.request_id}",
            # Names are distinct between workloads.
            unit_names=tuple(name | position << 48 for name in request.unit_names),
        )
        for position, workload in enumerate(workloads)
        for request in workload.requests
    ]
    together.sort(key=lambda request: request.arrival_s)
    return Workload(name, together, " + ".join(workload.source for workload in workloads))


def fit(workload: Workload, max_model_len: int) -> Workload:
    """Truncate prompts so that prompt and output together have at most `max_model_len` tokens.

    Outputs are not changed, since they are what the model produced. The source states how many prompts were
    truncated and how many requests left out. Raise WorkloadError if no request is left.
    """
    if max_model_len < 2:
        raise WorkloadError(f"no request fits into {max_model_len} tokens")
    fitting, clipped, dropped = [], 0, 0
    for request in workload.requests:
        room = max_model_len - request.output_tokens
        if room < 1:
            dropped += 1
        elif request.prompt_tokens > room:
            clipped += 1
            fitting.append(replace(request, prompt_tokens=room))
        else:
            fitting.append(request)
    if not fitting:
        raise WorkloadError(f"{workload.name}: no request fits into {max_model_len} tokens")
    source = workload.source
    if clipped or dropped:
        total = len(workload.requests)
        source += f"; to fit {max_model_len} tokens {clipped} of {total} prompts cut, {dropped} left out"
    return Workload(workload.name, fitting, source)
