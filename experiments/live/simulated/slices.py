"""Take slices of traces, at a rate that loads the fleet without overloading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experiments.live.simulated.shape import BLOCK_TOKENS, FleetShape
from simulator.request import SimRequest
from simulator.workloads.base import Workload, WorkloadError
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.profiles import Profile, load_profile
from worker_agent.engine.simulated.settings import at_speed


@dataclass(frozen=True, slots=True)
class TraceKind:
    """A source of requests. `path`: relative to the data folder; empty: a generator."""

    name: str
    file_format: str
    path: str
    # Where the slice begins in the trace, after a lull at its start.
    start_s: float = 0.0


TRACES: Final = {
    kind.name: kind
    for kind in (
        TraceKind("azure-code", "azure", "traces/azure_llm_2023/AzureLLMInferenceTrace_code.csv"),
        TraceKind("azure-conv", "azure", "traces/azure_llm_2023/AzureLLMInferenceTrace_conv.csv"),
        TraceKind("mooncake", "mooncake", "traces/mooncake/conversation_trace.jsonl"),
        TraceKind("burstgpt", "burstgpt", "traces/burstgpt/BurstGPT_1.csv"),
        TraceKind("r1", "r1", ""),
    )
}


@dataclass(frozen=True, slots=True)
class Slice:
    """Requests and the fleet to run them on."""

    trace: str
    source: str
    requests: Sequence[SimRequest]
    shape: FleetShape
    # Requested share of the fleet's capacity, and the resulting arrivals per second.
    load: float
    rate_per_s: float
    seed: int

    @property
    def output_tokens(self) -> int:
        """The output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Specification of a slice. Times in seconds."""

    workers: int
    seconds: float
    load: float
    profile: str
    speed: float
    seats: int
    # Requests with more output are left out: the run would only wait for them.
    longest_output: int
    seed: int


def available_traces(data: Path | None) -> list[str]:
    """Return the names of the traces that exist."""
    return [
        kind.name
        for kind in TRACES.values()
        if not kind.path or (data is not None and (data / kind.path).is_file())
    ]


def take_slice(name: str, data: Path | None, spec: SliceSpec) -> Slice:
    """Take as many of the trace's first requests as make up the load. Raise WorkloadError if there are too
    few."""
    profile = at_speed(load_profile(spec.profile), spec.speed)
    kind = TRACES[name]
    # Far more than needed: the number depends on their lengths.
    sample = _sample(kind, data, 20_000, spec)
    work = _work_s(sample.requests, profile, spec.seats)
    rate = spec.load * spec.workers / float(np.mean(work))
    count = max(2, round(rate * spec.seconds))
    if count > len(sample.requests):
        raise WorkloadError(f"{name}: {len(sample.requests)} requests, {count} needed")
    requests = (
        _overlay_windows(sample.requests[:count], spec.seconds)
        if kind.path
        else _number_requests(_scale_to_rate(sample.requests, rate)[:count])
    )
    contexts = [request.prompt_tokens + request.output_tokens for request in requests]
    mean_context = float(np.mean(contexts))
    # KV for two full batches of average requests, and for the longest request and half as much again.
    kv_tokens = max(2.0 * spec.seats * mean_context, 1.5 * max(contexts))
    prefill = float(np.sum(_prefill_s(requests, profile)) / np.sum(_work_s(requests, profile, spec.seats)))
    shape = FleetShape(
        workers=spec.workers,
        profile=spec.profile,
        speed=spec.speed,
        seats=spec.seats,
        kv_blocks=int(kv_tokens) // BLOCK_TOKENS + 1,
        max_tokens=max(request.output_tokens for request in requests),
        reasons=any(request.reasoning_tokens for request in requests),
        prefill_instances=min(max(round(prefill * spec.workers), 1), spec.workers - 1),
    )
    source = f"{sample.source}; those of more than {spec.longest_output} output tokens left out"
    if kind.path:
        source += f"; the first {count}, windows of {spec.seconds:g} s laid over each other"
    return Slice(name, source, requests, shape, spec.load, rate, spec.seed)


def _sample(kind: TraceKind, data: Path | None, count: int, spec: SliceSpec) -> Workload:
    options = WorkloadOptions(seed=spec.seed, count=count, start_s=kind.start_s)
    if kind.path:
        if data is None:
            raise WorkloadError(f"{kind.name}: no folder of the public data; set TAILRACE_DATA")
        workload = resolve_workload(f"{kind.file_format}:{data / kind.path}", options)
    else:
        workload = resolve_workload(kind.file_format, replace(options, rate_per_s=1.0))
    kept = [r for r in workload.requests if r.output_tokens <= spec.longest_output]
    if not kept:
        raise WorkloadError(f"{kind.name}: no request of at most {spec.longest_output} output tokens")
    return Workload(workload.name, kept, workload.source)


def _overlay_windows(requests: Sequence[SimRequest], seconds: float) -> list[SimRequest]:
    """Overlay consecutive windows of so many seconds.

    The number of windows sets the rate. If the trace were accelerated instead, lulls and bursts of minutes
    would become ones of seconds, which a fleet of this size does not see.
    """
    first_s = requests[0].arrival_s
    folded = [replace(r, arrival_s=(r.arrival_s - first_s) % seconds) for r in requests]
    return _number_requests(sorted(folded, key=lambda r: r.arrival_s))


def _scale_to_rate(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """Scale arrival times to this rate per second; the original rate is meaningless, as long requests were
    left out."""
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    faster = len(requests) / (last_s - first_s) / rate
    return [replace(r, arrival_s=(r.arrival_s - first_s) * faster) for r in requests]


def _number_requests(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return [replace(request, request_id=f"q{n}") for n, request in enumerate(requests)]


def _prefill_s(requests: Sequence[SimRequest], profile: Profile) -> NDArray[np.float64]:
    return np.array([profile.prefill.ms(0, r.prompt_tokens) for r in requests], np.float64) / 1e3


def _work_s(requests: Sequence[SimRequest], profile: Profile, seats: int) -> NDArray[np.float64]:
    """Return the seconds of an instance that each request takes with a full batch."""
    mean_kv = float(np.mean([r.prompt_tokens + r.output_tokens / 2 for r in requests]))
    step_s = profile.step_ms(0.0, seats, round(seats * mean_kv)) / 1e3
    outputs = np.array([r.output_tokens for r in requests], np.float64)
    return _prefill_s(requests, profile) + outputs * step_s / seats
