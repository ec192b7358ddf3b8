"""What is compared: ways to go beyond one scheduler, and the workloads to compare them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from experiments.cache.placement import WORKLOADS as CACHE_WORKLOADS
from experiments.scenarios import LLAMA, PACE_S, TTFT_S, Scenario, Slo, generated
from experiments.shards.leased import Leased, LeaseTerms
from experiments.shards.sharded import Sharded, request_key, session_key
from simulator.cluster import ClusterSpec
from simulator.setups import Setup
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Way:
    """A way to place the requests of a fleet.

    `shards` schedulers, of which `drawn` are drawn for each request, by a hash of its ID or (`sticky`) of its
    session's; or one scheduler that leases placements to front ends.
    """

    name: str
    shards: int = 1
    drawn: int = 1
    # Whether all that are drawn are asked; otherwise the one with the fewest requests.
    compares: bool = False
    sticky: bool = False
    terms: LeaseTerms | None = None
    # Interval of the workers' reports in seconds.
    report_s: float = 0.5

    @property
    def calls(self) -> float:
        """Return the calls of schedulers per placement, without leases."""
        return float(self.drawn if self.compares else 1)

    def policy(self, setup: Setup, deployment: Deployment, spec: ClusterSpec, front_ends: int) -> Policy:
        """Return the policy that imitates it."""
        if self.terms is not None:
            return Leased(setup.policy(deployment), self.terms, front_ends)
        if self.shards == 1:
            return setup.policy(deployment)
        return Sharded(
            [setup.policy(deployment) for _ in range(self.shards)],
            [instance.instance_id for instance in spec.instances],
            drawn=self.drawn,
            judge=setup.policy(deployment) if self.compares else None,
            key=session_key if self.sticky else request_key,
        )


def sharded(*counts: int) -> list[Way]:
    """Return ways with so many shards, of which each request asks a random one."""
    return [Way(f"{count} shards, random", count) for count in counts]


def emptier(*counts: int) -> list[Way]:
    """Return ways in which a load balancer takes the shard with fewer requests of two."""
    return [Way(f"{count} shards, emptier of 2", count, 2) for count in counts]


def compared(*counts: int) -> list[Way]:
    """Return ways in which front ends ask two shards."""
    return [Way(f"{count} shards, best of 2", count, 2, compares=True) for count in counts]


def by_session(*ways: Way) -> list[Way]:
    """Return the same ways with shards drawn by session."""
    names = (way.name.replace("random", "by session") for way in ways)
    return [
        replace(way, name=name if way.drawn == 1 else f"{name} by session", sticky=True)
        for way, name in zip(ways, names, strict=True)
    ]


def leased(*terms: tuple[int, float]) -> list[Way]:
    """Return ways with leases for so many requests and seconds."""
    return [Way(f"leases of {n}, {s:g} s", terms=LeaseTerms(n, s)) for n, s in terms]


ONE: Final = Way("one scheduler")
_SLOW_REPORTS: Final = Way("one, reports every 2 s", report_s=2.0)
ALL: Final[tuple[Way, ...]] = (
    ONE,
    _SLOW_REPORTS,
    *sharded(2, 4, 8, 16),
    *emptier(4, 8, 16),
    *compared(4, 8, 16),
    *leased((4, 1.0), (16, 1.0), (64, 1.0), (64, 0.1), (64, 4.0)),
)
# For long simulations.
FEW: Final[tuple[Way, ...]] = (ONE, *sharded(16), *emptier(16), *compared(16), *leased((16, 1.0)))
SESSIONS: Final[tuple[Way, ...]] = (
    ONE,
    *sharded(16),
    *by_session(*sharded(16), *emptier(16), *compared(16)),
    *leased((16, 1.0)),
)


def _scenario(
    workload: str, profile: str, seconds: float, slos: Sequence[Slo], rate_per_s: float
) -> Scenario:
    return Scenario(
        workload, "", generated(workload), profile, 16, seconds, tuple(slos), rate_per_s, needs_traces=False
    )


# Rates per second and durations are those with which the search for the sustainable rate begins, on 16
# instances (four for sessions). Requests that arrive in the first third are not counted: the fleet fills up,
# and caches are empty.
WORKLOADS: Final[Mapping[str, Scenario]] = {
    "chat": _scenario("sharegpt_turns", LLAMA, 18.0, [Slo("sharegpt_turns", TTFT_S, PACE_S)], 220.0),
    "reasoning": _scenario("alpaca_eval", "r1-distill-qwen-32b-h100", 75.0, [], 64.0),
    "sessions": replace(CACHE_WORKLOADS["agent_sessions"], seconds=45.0),
}
