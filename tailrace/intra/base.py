"""What an intra-instance policy decides, on plain data.

A policy says four things: in which order requests are served (`rank`), for how long that holds
(`rank_holds`), whether a request that waits may take the place of one that runs (`preemptive`), and how
many prompt tokens a step may carry beside its decodes (`prefill_budget`). `tailrace.intra.allocate` turns
them into whom to admit and whom to preempt. Nothing is remembered between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

from tailrace.cluster import Phase
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter

# Smaller is served earlier. The last element is the arrival order, which makes ranks of one instance
# distinct. A policy says which of those before it are the level, within which nobody is preempted for
# anybody.
Rank = tuple[int, ...]

# Name of the engine's own order: no policy of ours. A simulation takes first come, first served for it, which
# is what vLLM's order is.
ENGINE_ORDER: Final = "vllm"

# Token quantum of PASCAL's evaluation, section V-A.
QUANTUM_TOKENS: Final = 500

# Shared by every policy and order that counts in quanta.
QUANTUM: Final = Parameter(
    "quantum_tokens",
    int,
    QUANTUM_TOKENS,
    "output tokens per quantum; an answer with fewer is fresh",
    unit="tokens",
    source="PASCAL, section V-A",
    minimum=1,
)
WATERMARK: Final = Parameter(
    "watermark",
    float,
    0.01,
    "share of an instance's KV blocks that admission leaves free, so that the batch can grow",
    source="vLLM 0.6",
    minimum=0.0,
    maximum=1.0,
)
PASS_OVER: Final = Parameter(
    "pass_over",
    float,
    0.0,
    "KV that later requests of the same level may take past a waiting request that does not fit, before "
    "it blocks them, as a multiple of the instance's KV",
    source="vLLM: admission stops at the first request that does not fit",
    minimum=0.0,
)


@dataclass(frozen=True, slots=True)
class JobView:
    """One request as its instance's scheduler sees it. Lengths in tokens."""

    # Order of arrival; distinct on one instance. A request keeps it through preemption and migration.
    arrival: int
    phase: Phase
    prompt_tokens: int
    output_tokens: int
    # Output tokens made in the current phase; 0 while prefilling.
    phase_tokens: int
    # When it came to the fleet, in seconds of a clock that all instances share.
    arrived_s: float = 0.0
    # Prefill that was left to do on its instance when it came there, in seconds of `tailrace.intra.due`.
    queue_s: float = 0.0
    # When it began to answer, on that clock; of no meaning before.
    answering_s: float = 0.0
    # It waits, and the time that `IntraPolicy.lapses_s` gave has come.
    lapsed: bool = False

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV it has or needs."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class ImportView:
    """A migration that waits for room on this instance."""

    # Order in which it was asked for.
    asked: int
    context_tokens: int
    # Tokens of KV in use on its source.
    source_kv_tokens: int


class IntraPolicy(ABC):
    """Pure; constructor parameters are its only state."""

    # Keyword arguments of the constructor. Those that a policy of the fleet shares with the order that goes
    # with it have the same name and mean the same.
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    # Facts of the deployment that it goes by, keyword arguments too; of them only the SLOs and the pace are
    # known to workers.
    needs: ClassVar[tuple[Fact, ...]] = ()
    summary: str = ""
    # A waiting request takes the place of the last-ranked running ones whose level is below its own.
    preemptive: bool = False
    # A migrated request that finds the device full may wait in host memory; otherwise it is refused.
    receives_on_host: bool = False
    # Share of the KV blocks that an admission leaves free, so that the batch can grow; 0.01: vLLM 0.6's.
    watermark: float = 0.01
    # PASS_OVER; see `tailrace.intra.allocate`.
    pass_over: float = 0.0

    @abstractmethod
    def rank(self, job: JobView) -> Rank:
        """Order of service; must end in `job.arrival` and have the same length for all jobs."""

    def rank_holds(self, job: JobView) -> int | None:
        """Output tokens, at least 1, after which `rank` may change in this phase; None: it does not."""
        return None

    def lapses_s(self, job: JobView) -> float | None:
        """When the rank of a request that waits changes though nothing happens to it: once, by the clock of
        `arrived_s`; None: it does not."""
        return None

    def takes_from(self, rank: Rank, victim: Rank) -> bool:
        """Whether who waits at this rank may take the place of one that runs at that rank."""
        return self.level(victim) > self.level(rank)

    def level(self, rank: Rank) -> Rank:
        """The beginning of a rank that says who may take whose place; all but the arrival, unless said."""
        return rank[:-1]

    def demoted(self, job: JobView) -> bool:
        """Whether a reasoning request is treated as answering (PASCAL, section IV-C)."""
        return False

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        """Prompt tokens that a step may compute beside `decoding` decodes, out of `step_tokens` in all."""
        return max(0, step_tokens - decoding)

    def import_rank(self, waiting: ImportView) -> Rank:
        """Order in which migrations get room here; first come, first served."""
        return (waiting.asked,)
