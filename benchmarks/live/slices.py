"""Slices of traces, at a rate that loads the fleet but does not overload it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.live.shape import BLOCK_TOKENS, FleetShape
from simulator.request import SimRequest
from simulator.workloads.base import Workload, WorkloadError
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.profiles import Profile, load_profile
from worker_agent.engine.simulated.settings import at_speed


@dataclass(frozen=True, slots=True)
class TraceKind:
    """One source of requests. `path` below the data folder; "": a generator."""

    name: str
    form: str
    path: str
    # Where in the trace the slice begins: past a lull at its start.
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
    """Requests and the fleet that they are for."""

    trace: str
    source: str
    requests: Sequence[SimRequest]
    shape: FleetShape
    # Requested share of what the fleet can do, and the arrivals a second that make it.
    load: float
    rate_per_s: float
    seed: int

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.output_tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a slice should be. Times in seconds."""

    workers: int
    seconds: float
    load: float
    profile: str
    speed: float
    seats: int
    # Requests with more output are left out: the run would wait for them alone.
    longest_output: int
    seed: int


def available(data: Path | None) -> list[str]:
    """Traces that are there."""
    return [
        kind.name
        for kind in TRACES.values()
        if not kind.path or (data is not None and (data / kind.path).is_file())
    ]


def take_slice(name: str, data: Path | None, wish: Wish) -> Slice:
    """As many of the trace's first requests as make the load. Raises WorkloadError."""
    profile = at_speed(load_profile(wish.profile), wish.speed)
    kind = TRACES[name]
    # Far more than a slice needs: how many depends on their lengths.
    sample = _sample(kind, data, 20_000, wish)
    work = _work_s(sample.requests, profile, wish.seats)
    rate = wish.load * wish.workers / float(np.mean(work))
    count = max(2, round(rate * wish.seconds))
    if count > len(sample.requests):
        raise WorkloadError(f"{name}: {len(sample.requests)} requests, {count} needed")
    requests = (
        _folded(sample.requests[:count], wish.seconds)
        if kind.path
        else _renamed(_at_rate(sample.requests, rate)[:count])
    )
    contexts = [request.prompt_tokens + request.output_tokens for request in requests]
    mean_context = float(np.mean(contexts))
    # Room for two full batches of the usual, and for the longest with something beside it.
    kv_tokens = max(2.0 * wish.seats * mean_context, 1.5 * max(contexts))
    prefill = float(np.sum(_prefill_s(requests, profile)) / np.sum(_work_s(requests, profile, wish.seats)))
    shape = FleetShape(
        workers=wish.workers,
        profile=wish.profile,
        speed=wish.speed,
        seats=wish.seats,
        kv_blocks=int(kv_tokens) // BLOCK_TOKENS + 1,
        max_tokens=max(request.output_tokens for request in requests),
        reasons=any(request.reasoning_tokens for request in requests),
        prefill_instances=min(max(round(prefill * wish.workers), 1), wish.workers - 1),
    )
    source = f"{sample.source}; those of more than {wish.longest_output} output tokens left out"
    if kind.path:
        source += f"; the first {count}, windows of {wish.seconds:g} s laid over each other"
    return Slice(name, source, requests, shape, wish.load, rate, wish.seed)


def _sample(kind: TraceKind, data: Path | None, count: int, wish: Wish) -> Workload:
    options = WorkloadOptions(seed=wish.seed, count=count, start_s=kind.start_s)
    if kind.path:
        if data is None:
            raise WorkloadError(f"{kind.name}: no folder of the public data; set TAILRACE_DATA")
        workload = resolve_workload(f"{kind.form}:{data / kind.path}", options)
    else:
        workload = resolve_workload(kind.form, replace(options, rate_per_s=1.0))
    kept = [r for r in workload.requests if r.output_tokens <= wish.longest_output]
    if not kept:
        raise WorkloadError(f"{kind.name}: no request of at most {wish.longest_output} output tokens")
    return Workload(workload.name, kept, workload.source)


def _folded(requests: Sequence[SimRequest], seconds: float) -> list[SimRequest]:
    """Consecutive windows of so many seconds laid over each other.

    The rate comes from how many they are: a trace that is run faster instead turns the lulls and bursts of
    its minutes into ones of seconds, which no fleet of this size has.
    """
    first_s = requests[0].arrival_s
    folded = [replace(r, arrival_s=(r.arrival_s - first_s) % seconds) for r in requests]
    return _renamed(sorted(folded, key=lambda r: r.arrival_s))


def _at_rate(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """As many a second. How fast they came says nothing: those with much output were left out."""
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    faster = len(requests) / (last_s - first_s) / rate
    return [replace(r, arrival_s=(r.arrival_s - first_s) * faster) for r in requests]


def _renamed(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return [replace(request, request_id=f"q{n}") for n, request in enumerate(requests)]


def _prefill_s(requests: Sequence[SimRequest], profile: Profile) -> NDArray[np.float64]:
    return np.array([profile.prefill.ms(0, r.prompt_tokens) for r in requests], np.float64) / 1e3


def _work_s(requests: Sequence[SimRequest], profile: Profile, seats: int) -> NDArray[np.float64]:
    """Seconds of one instance that each request takes when its batch is full."""
    mean_kv = float(np.mean([r.prompt_tokens + r.output_tokens / 2 for r in requests]))
    step_s = profile.step_ms(0.0, seats, round(seats * mean_kv)) / 1e3
    outputs = np.array([r.output_tokens for r in requests], np.float64)
    return _prefill_s(requests, profile) + outputs * step_s / seats
