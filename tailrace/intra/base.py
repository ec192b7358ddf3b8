"""The interface of an intra-instance policy (batch order), on plain data.

A policy decides five things: the order in which requests are served (`rank`), how long a rank is valid
(`rank_holds`), whether a waiting request may preempt a running one (`preemptive`), whether a waiting prompt
is kept back so that others get their tokens in time (`keeps_back`), and how many prompt tokens a step may
compute beside its decodes (`prefill_budget`). `tailrace.intra.allocate` turns these into
admissions and preemptions. A policy keeps no state between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from tailrace.cluster import Phase
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parametrized, parameter

# Smaller ranks are served earlier. The last element is the arrival order, which makes ranks distinct on an
# instance. A prefix of the rank is the level, within which requests do not preempt each other.
Rank = tuple[int, ...]

# Name of the engine's own order. Simulations use first come, first served for it, as vLLM does.
ENGINE_ORDER: Final = "vllm"

# Token quantum of PASCAL's evaluation, section V-A.
QUANTUM_TOKENS: Final = 500

# Shared by every policy and order that counts in quanta.
QUANTUM: Final = parameter(
    QUANTUM_TOKENS,
    "output tokens per quantum; an answer with fewer is fresh",
    unit="tokens",
    source="PASCAL, section V-A",
    minimum=1,
)
WATERMARK: Final = parameter(
    0.01,
    "share of an instance's KV blocks that admission leaves free, so that the batch can grow",
    source="vLLM 0.6",
    minimum=0.0,
    maximum=1.0,
)
PASS_OVER_MAX: Final = 1e6
PASS_OVER: Final = parameter(
    0.0,
    "KV that later requests of the same level may take past a waiting request that does not fit, before "
    "it blocks them, as a multiple of the instance's KV",
    source="vLLM: admission stops at the first request that does not fit",
    minimum=0.0,
    maximum=PASS_OVER_MAX,
)


# Requests that decode here, and are not about to leave, before prompts wait for their sake. Fewer would gain
# little: of an instance that only prefills for others, those decode that have not been handed over yet.
FEWEST_DECODING: Final = 4


class TokenIntervals(NamedTuple):
    """Times between the tokens of an instance's requests, in seconds."""

    # The time, on the clock of `JobView.arrived_s`.
    now_s: float
    # Mean over the last one to two seconds.
    mean_s: float
    # About the least so far: the mean of the fastest second, or a step with one request.
    shortest_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """A request as seen by its instance's scheduler. Lengths in tokens."""

    # Order of arrival; distinct on one instance. A request keeps it through preemption and migration.
    arrival: int
    phase: Phase
    prompt_tokens: int
    output_tokens: int
    # Output tokens generated in the current phase; 0 while prefilling.
    phase_tokens: int
    # When it arrived at the fleet, in seconds of a clock that all instances share.
    arrived_s: float = 0.0
    # Prefill queued on its instance when it arrived there, in nominal seconds
    # (`tailrace.intra.earliest_due`).
    queue_s: float = 0.0
    # When it began to answer, on the same clock; meaningless before.
    answering_s: float = 0.0
    # Whether it was still waiting at the time given by `IntraPolicy.lapses_s`.
    lapsed: bool = False

    @property
    def context_tokens(self) -> int:
        """Return the number of tokens whose KV the request has or needs."""
        return self.prompt_tokens + self.output_tokens


class IntraPolicy(Parametrized, ABC):
    """A batch order. Pure; its parameters are its only state. One shared with the fleet's policy has the same
    name and meaning there."""

    # Facts about the deployment that it uses, also keyword arguments; workers know only the SLOs and the
    # pace.
    needs: ClassVar[tuple[Fact, ...]] = ()
    summary: str = ""
    # Why it is asked no more (`tailrace.intra.guarded`); empty: it is asked.
    mistake: str = ""
    # Whether a waiting request preempts the last-ranked running ones whose level is below its own.
    preemptive: bool = False
    # Whether `keeps_back` is asked.
    may_keep_back: bool = False
    # Whether a migrated request may wait in host memory if the device is full; else it is refused.
    receives_on_host: bool = False
    # Share of the KV blocks that admission leaves free, so that the batch can grow (parameter WATERMARK).
    watermark: float = 0.01
    # Parameter PASS_OVER; see `tailrace.intra.allocate`.
    pass_over: float = 0.0

    @abstractmethod
    def rank(self, job: JobView) -> Rank:
        """Return a request's rank, which ends in `job.arrival` and has the same length for all jobs."""

    def rank_holds(self, job: JobView) -> int | None:
        """Return the number of output tokens (at least 1) for which `rank` is valid in this phase; None: for
        the whole phase."""
        return None

    def lapses_s(self, job: JobView) -> float | None:
        """Return the time at which a waiting request's rank changes by itself, once, on the clock of
        `arrived_s`; None: never."""
        return None

    def takes_from(self, rank: Rank, victim: Rank) -> bool:
        """Return whether a waiting request with this rank may preempt a running one with rank `victim`."""
        return self.level(victim) > self.level(rank)

    def level(self, rank: Rank) -> Rank:
        """Return the part of a rank that decides about preemption; by default all but the arrival."""
        return rank[:-1]

    def keeps_back(self, rank: Rank, intervals: TokenIntervals) -> bool:
        """Return whether a waiting prompt with this rank is not admitted yet, since those that decode get
        their tokens too slowly already. Asked only if FEWEST_DECODING decode and stay."""
        return False

    def demoted(self, job: JobView) -> bool:
        """Return whether a reasoning request is treated as answering (PASCAL, section IV-C)."""
        return False

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        """Return the prompt tokens that a step of `step_tokens` may compute beside `decoding` decodes.

        Without decodes they are above 0, or nothing would ever run.
        """
        return max(0, step_tokens - decoding)
