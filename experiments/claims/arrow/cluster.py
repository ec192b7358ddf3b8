"""Arrow's testbed (section 7.1) and the schedulers of its ablation (section 7.3), the same for every row.

Eight H800 with a Llama-3.1-8B each, connected by NVLink. Link bandwidth is half of the 400 GB/s that the
paper quotes, which is the sum of both directions. Scheduler, order inside an instance, initial pools and
migration are those of `simulator.setups`. Rates are the trace's own times multiplied by a constant (section
7.1).

A run serves a whole trace from an empty cluster, which is the paper's operating point. A trace is one sample;
further samples begin elsewhere in it, with the earlier part moved to the end (`rotated`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from simulator.cluster import ClusterSpec, LinkSpec, MigrationSpec
from simulator.records import SimResult
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.arrivals import at_rate
from simulator.workloads.base import Workload
from simulator.workloads.traces import load_azure
from tailrace.policy.deployment import Deployment
from tailrace.profiles import Profile, load_profile
from tailrace.slo import Slo

PROFILE: Final = "llama-3.1-8b-h800"
INSTANCES: Final = 8
LINK_BYTES_PER_S: Final = 200e9
# QoE is not evaluated: with a pace so slow that no token is late, it costs no time.
_IRRELEVANT_PACE_S: Final = 1e3
# "SLO Aware", "Minimal Load" and "Round Robin" of figure 8.
SLO_AWARE: Final = "arrow"
MINIMAL_LOAD: Final = "static_pools"
ROUND_ROBIN: Final = "experiments.claims.arrow.round_robin:RoundRobinPools dispatch=round_robin"


@dataclass(frozen=True, slots=True)
class Engines:
    """What of the paper's engines is assumed; the default is what the rows are judged with."""

    # Milliseconds that an engine adds to each step on the CPU, which step times of kernels do not have.
    overhead_ms: float = 0.0
    # Whether a request whose KV waits for a decode instance makes no token meanwhile and waits until there is
    # room, as in equation 4 and section 5.4. In ours it goes on decoding, and the tick tries again.
    waits_paused: bool = False

    def slowed(self, profile: Profile) -> Profile:
        """Return the profile with the overhead."""
        prefill, decode = profile.prefill, profile.decode
        return msgspec.structs.replace(
            profile,
            prefill=msgspec.structs.replace(prefill, base_ms=prefill.base_ms + self.overhead_ms),
            decode=msgspec.structs.replace(decode, base_ms=decode.base_ms + self.overhead_ms),
        )

    def migration(self, spec: MigrationSpec) -> MigrationSpec:
        """Return how KV moves."""
        return replace(spec, paused=True, patience_s=_FOR_EVER_S) if self.waits_paused else spec


_FOR_EVER_S: Final = 1e6
AS_JUDGED: Final = Engines()


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace and its service level (table 1)."""

    name: str
    # Path inside the directory of traces.
    file: str
    slo: Slo

    def load(self, traces: Path) -> Workload:
        """Read the trace. Raise WorkloadError."""
        return load_azure(traces / self.file)


CODE: Final = Trace("Azure Code", "azure_llm_2023/AzureLLMInferenceTrace_code.csv", Slo(3.0, 0.1))
CONVERSATION: Final = Trace(
    "Azure Conversation", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv", Slo(2.0, 0.15)
)


def rotated(workload: Workload, start: float) -> Workload:
    """Begin a workload at a share of its requests, and move the requests before that to the end."""
    requests = workload.requests
    count = len(requests)
    first = int(start * count) % count
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    period_s = span_s * count / max(1, count - 1)
    reordered = [
        *requests[first:],
        *(replace(r, arrival_s=r.arrival_s + period_s) for r in requests[:first]),
    ]
    began_s = reordered[0].arrival_s
    shifted = [replace(r, arrival_s=r.arrival_s - began_s) for r in reordered]
    return Workload(workload.name, shifted, f"{workload.source}; begun at {start:g}")


def half_capacity_per_s(profile: Profile, workload: Workload) -> float:
    """Return the rate, in requests per second, at which half of the eight instances can prefill at most, one
    prompt at a time.

    It is the unit of rates, and depends only on the trace's lengths and the profile.
    """
    prefill = profile.prefill
    prompts = [r.prompt_tokens for r in workload.requests]
    mean_ms = prefill.base_ms + sum(prefill.ms(0, tokens) for tokens in prompts) / len(prompts)
    return INSTANCES / 2 / (mean_ms / 1e3)


def replay(
    trace: Trace,
    workload: Workload,
    policy: str,
    rate_per_s: float,
    instances: int,
    engines: Engines = AS_JUDGED,
) -> SimResult:
    """Simulate the trace at another mean rate under one scheduler."""
    profile = engines.slowed(load_profile(PROFILE))
    setup = setup_for(policy)
    link = LinkSpec(bytes_per_s=LINK_BYTES_PER_S)
    spec = replace(ClusterSpec.uniform(instances, profile), link=link, tpot_target_s=_IRRELEVANT_PACE_S)
    requests = at_rate(workload, rate_per_s).requests
    decider = setup.policy(Deployment(trace.slo, profile))
    spec = setup.apply(spec)
    spec = replace(spec, migration=engines.migration(spec.migration))
    return simulate(spec, requests, decider, setup.intra(trace.slo))
