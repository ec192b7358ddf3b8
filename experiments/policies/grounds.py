"""The grounds on which policies are compared: a workload, a fleet and SLOs each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from simulator.comparison import section_starts_s
from simulator.scenario import Scenario, SimulatedFleet
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.slo import Slo

_LLAMA: Final = "llama-3.1-8b-h100"
_R1: Final = "r1-distill-qwen-32b-h100"


@dataclass(frozen=True, slots=True)
class Ground:
    """A workload (`{traces}` stands for the folder of traces), the fleet that serves it, and its SLOs."""

    name: str
    title: str
    workload: str
    fleet: SimulatedFleet
    slo: Slo
    # Requests per second that the fleet certainly serves.
    least_rate_per_s: float
    # Seconds of arrivals, as a multiple of those of the comparison: requests that reason last for minutes.
    longer: float = 1.0
    # Requests of a trace that a seed's section has, spread over the whole of it; None: generated, all drawn.
    section: int | None = None

    @property
    def is_trace(self) -> bool:
        """Return whether it is a recorded trace."""
        return ":" in self.workload


GROUNDS: Final[Mapping[str, Ground]] = {
    ground.name: ground
    for ground in (
        Ground("reasoning", "Reasoning (R1)", "r1", SimulatedFleet(_R1, 8), Slo(2.0, 0.1), 2.0, longer=4.0),
        Ground("chat", "Chat, tight SLOs", "sharegpt_turns", SimulatedFleet(_LLAMA, 4), Slo(0.5, 0.03), 15.0),
        Ground(
            "unequal",
            "Chat on two H100 and two RTX 4090",
            "sharegpt_turns",
            SimulatedFleet(f"{_LLAMA}:2,llama-3.1-8b-rtx4090:2", 4),
            Slo(0.5, 0.05),
            8.0,
        ),
        Ground(
            "agents",
            "Agents in loops, prefix caches",
            "agent_sessions",
            SimulatedFleet(_LLAMA, 4, prefix_caching=True),
            Slo(5.0, 0.1),
            12.0,
        ),
        Ground(
            "mixed", "Short and long, little KV", "plain_mix", SimulatedFleet(_LLAMA, 4), Slo(2.0, 0.1), 15.0
        ),
        Ground(
            "code",
            "Code completion (Azure)",
            "azure:{traces}/azure_llm_2023/AzureLLMInferenceTrace_code.csv",
            SimulatedFleet(_LLAMA, 4),
            Slo(3.0, 0.1),
            25.0,
            section=6_000,
        ),
        Ground(
            "conversation",
            "Conversation (Azure)",
            "azure:{traces}/azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
            SimulatedFleet(_LLAMA, 4),
            Slo(2.0, 0.15),
            40.0,
            section=8_000,
        ),
        Ground(
            "long-prompts",
            "Long prompts (Mooncake), prefix caches",
            "mooncake:{traces}/mooncake/conversation_trace.jsonl",
            SimulatedFleet(_LLAMA, 4, prefix_caching=True),
            Slo(30.0, 0.1),
            1.5,
            longer=5.0,
            section=4_000,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    ground: str
    policy: str
    rate_per_s: float
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return f"{self.ground}/{self.policy}/{self.rate_per_s:.4g}/{self.seed}"


def scenario_of(case: Case, traces: Path | None, seconds: float, seeds: int) -> Scenario:
    """Return the scenario: of a trace the seed's section, else so many seconds of arrivals drawn with it."""
    ground = GROUNDS[case.ground]
    workload = ground.workload.format(traces=traces)
    count, start_s = round(ground.longer * seconds * case.rate_per_s), 0.0
    if ground.section is not None:
        count = min(count, ground.section)
        whole = resolve_workload(workload, WorkloadOptions())
        start_s = section_starts_s(whole, count, seeds)[case.seed % seeds]
    options = WorkloadOptions(seed=case.seed, rate_per_s=case.rate_per_s, count=count, start_s=start_s)
    return Scenario(case.policy, workload, options, ground.fleet, ground.slo)
