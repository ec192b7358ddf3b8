"""Scenarios in which policies are compared: workload, fleet and SLOs, each taken from a paper.

SLOs are those of Arrow's table 1 for its traces. A reasoning request meets its SLOs if its answer has
PASCAL's QoE of 0.95 and begins no later than the conversation's TTFT after the user could have read its
reasoning, at PASCAL's pace of 100 ms per token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from simulator.records import RequestRecord
from simulator.request import SimRequest
from simulator.workloads.arrivals import at_rate, merged
from simulator.workloads.base import Workload
from simulator.workloads.generators import GENERATORS
from simulator.workloads.resolve import WorkloadOptions, resolve_workload

PACE_S = 0.1
MIN_QOE = 0.95
TTFT_S, TPOT_S = 2.0, 0.15
AZURE = "traces/azure_llm_2023/AzureLLMInferenceTrace_{}.csv"
# (requests, mean rate per second, seed, folder that contains `traces/`) -> requests in order of arrival
Draw = Callable[[int, float, int, Path | None], Sequence[SimRequest]]


@dataclass(frozen=True, slots=True)
class Slo:
    """SLOs of requests without reasoning; `kind`: part of their IDs."""

    kind: str
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario: one group of rows in the table."""

    name: str
    # The policy whose paper it is from; empty: none.
    paper: str
    draw: Draw
    profile: str
    instances: int
    # Duration of arrivals: several times a request's duration, or the wait that its SLO allows.
    seconds: float
    slos: tuple[Slo, ...]
    # A rate that some policy sustains, where the search begins.
    first_rate_per_s: float
    penalty: str = "none"
    needs_traces: bool = True

    def strictest_slo(self) -> tuple[float, float]:
        """Return TTFT and TPOT in seconds, for policies with one pair for all requests."""
        ttfts, tpots = (slo.ttft_s for slo in self.slos), (slo.tpot_s for slo in self.slos)
        return min(ttfts, default=TTFT_S), min(tpots, default=TPOT_S)

    def meets_slos(self, record: RequestRecord) -> bool:
        """Return whether the request met its SLOs; a refused one did not."""
        if record.ttft_s is None or record.tpot_s is None or record.qoe is None:
            return False
        if record.reasoning_tokens:
            due_s = TTFT_S + PACE_S * record.reasoning_tokens
            return record.ttft_s <= due_s and record.qoe >= MIN_QOE
        slo = next(slo for slo in self.slos if slo.kind in record.request_id)
        return record.ttft_s <= slo.ttft_s and record.tpot_s <= slo.tpot_s


def trace_part(spec: str, kind: str) -> Draw:
    """Return a generator of parts of a trace, of any length and rate, at a position drawn from the seed."""

    def draw(count: int, rate_per_s: float, seed: int, traces: Path | None) -> Sequence[SimRequest]:
        assert traces is not None
        source, _, path = spec.partition(":")
        all_requests = _load_trace(f"{source}:{traces / path}")
        start = random.Random(seed).randrange(max(1, len(all_requests) - count))
        part = all_requests[start : start + count]
        shifted = [
            replace(r, request_id=f"{kind}-{n}", arrival_s=r.arrival_s - part[0].arrival_s)
            for n, r in enumerate(part)
        ]
        return at_rate(Workload(kind, shifted, spec), rate_per_s).requests

    return draw


@cache
def _load_trace(spec: str) -> Sequence[SimRequest]:
    return resolve_workload(spec, WorkloadOptions()).requests


def generated(name: str) -> Draw:
    """Return one of the simulator's generators, with its own arrivals."""

    def draw(count: int, rate_per_s: float, seed: int, traces: Path | None) -> Sequence[SimRequest]:
        return GENERATORS[name].requests(count, rate_per_s, seed)

    return draw


def mixed(parts: Mapping[str, Draw]) -> Draw:
    """Return a generator that mixes equal numbers of requests of each part."""

    def draw(count: int, rate_per_s: float, seed: int, traces: Path | None) -> Sequence[SimRequest]:
        each, rate = count // len(parts), rate_per_s / len(parts)
        drawn = [Workload(name, part(each, rate, seed, traces), name) for name, part in parts.items()]
        return merged("mix", drawn).requests

    return draw


CODE, CONV, MOONCAKE = Slo("code", 3.0, 0.1), Slo("conv", 2.0, 0.15), Slo("mooncake", 30.0, 0.1)
TRACES: Mapping[str, Draw] = {
    "azure-code": trace_part(f"azure:{AZURE.format('code')}", "code"),
    "azure-conv": trace_part(f"azure:{AZURE.format('conv')}", "conv"),
    "mooncake": trace_part("mooncake:traces/mooncake/conversation_trace.jsonl", "mooncake"),
}
MIX: Mapping[str, Draw] = {**TRACES, "r1": generated("r1")}
LLAMA = "llama-3.1-8b-h100"

# Half of Arrow's and PASCAL's fleets, to keep the benchmark short.
SCENARIOS: tuple[Scenario, ...] = (
    Scenario("azure-code", "arrow", TRACES["azure-code"], LLAMA, 4, 12.0, (CODE,), 75.0),
    Scenario("azure-conv", "arrow", TRACES["azure-conv"], LLAMA, 4, 10.0, (CONV,), 120.0),
    Scenario("mooncake", "arrow", TRACES["mooncake"], LLAMA, 4, 90.0, (MOONCAKE,), 5.0),
    Scenario("r1", "pascal", MIX["r1"], "r1-distill-qwen-32b-h100", 4, 180.0, (), 5.0, needs_traces=False),
    Scenario("mix", "", mixed(MIX), LLAMA, 4, 30.0, (CODE, CONV, MOONCAKE), 20.0),
    # ARES's testbed and lengths; the paper does not name its TPOT SLO, so PASCAL's pace is used.
    Scenario(
        "sharegpt-ares",
        "ares",
        generated("sharegpt_ares"),
        "r1-distill-qwen-7b-w8a8-rtx4090d",
        4,
        400.0,
        (Slo("sharegpt_ares", TTFT_S, PACE_S),),
        0.5,
        needs_traces=False,
    ),
    # CascadeInfer's model and GPU, with the cost of unequal lengths of its figure 2.
    Scenario(
        "sharegpt-turns",
        "cascade",
        generated("sharegpt_turns"),
        "llama-3.2-3b-h20",
        4,
        30.0,
        (Slo("sharegpt_turns", TTFT_S, PACE_S),),
        20.0,
        penalty="cascadeinfer-figure-2-step",
        needs_traces=False,
    ),
    # Two with little KV and no reasoning.
    Scenario(
        "plain-mix",
        "",
        generated("plain_mix"),
        LLAMA,
        4,
        80.0,
        (Slo("plain_mix", TTFT_S, PACE_S),),
        30.0,
        needs_traces=False,
    ),
    Scenario(
        "turns-small-gpu",
        "",
        generated("sharegpt_turns"),
        "llama-3.1-8b-rtx4090",
        4,
        80.0,
        (Slo("sharegpt_turns", TTFT_S, PACE_S),),
        5.0,
        needs_traces=False,
    ),
)
