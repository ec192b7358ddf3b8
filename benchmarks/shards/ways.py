"""What is compared: ways to go beyond one scheduler, and the workloads to compare them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.cache import WORKLOADS as CACHE_WORKLOADS
from benchmarks.scenarios import LLAMA, PACE_S, TTFT_S, Scenario, Slo, generated
from benchmarks.shards.leased import Leased, LeaseTerms
from benchmarks.shards.sharded import Sharded, by_request, by_session
from simulator.cluster import ClusterSpec
from simulator.setups import Setup
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Way:
    """A way to place the requests of a fleet.

    `shards` schedulers, of which each request asks `asked`, chosen by a hash of the request's ID or
    (`sticky`) of its session's; or one scheduler that leases placements to front ends.
    """

    name: str
    shards: int = 1
    asked: int = 1
    sticky: bool = False
    terms: LeaseTerms | None = None
    # Interval of the workers' reports in seconds.
    report_s: float = 0.5

    def policy(self, setup: Setup, deployment: Deployment, spec: ClusterSpec, front_ends: int) -> Policy:
        """Return the policy that imitates it."""
        if self.terms is not None:
            return Leased(setup.policy(deployment), self.terms, front_ends)
        if self.shards == 1:
            return setup.policy(deployment)
        return Sharded(
            [setup.policy(deployment) for _ in range(self.shards)],
            setup.policy(deployment),
            [instance.instance_id for instance in spec.instances],
            asked=self.asked,
            key=by_session if self.sticky else by_request,
        )


def sharded(*counts: int, asked: int = 1, sticky: bool = False) -> list[Way]:
    """Return ways with so many shards."""
    how = "random" if asked == 1 else f"best of {asked}"
    if sticky:
        how = "by session" if asked == 1 else f"{how} by session"
    return [Way(f"{count} shards, {how}", count, asked, sticky) for count in counts]


def leased(*terms: tuple[int, float]) -> list[Way]:
    """Return ways with leases for so many requests and seconds."""
    return [Way(f"leases of {n}, {s:g} s", terms=LeaseTerms(n, s)) for n, s in terms]


ONE: Final = Way("one scheduler")
_SLOW_REPORTS: Final = Way("one, reports every 2 s", report_s=2.0)
ALL: Final[tuple[Way, ...]] = (
    ONE,
    _SLOW_REPORTS,
    *sharded(2, 4, 8, 16),
    *sharded(4, 8, 16, asked=2),
    *leased((4, 1.0), (16, 1.0), (64, 1.0), (64, 0.1), (64, 4.0)),
)
# For long simulations.
FEW: Final[tuple[Way, ...]] = (ONE, *sharded(4, 16), *sharded(16, asked=2), *leased((16, 1.0)))
SESSIONS: Final[tuple[Way, ...]] = (
    ONE,
    *sharded(4, 16),
    *sharded(4, 16, sticky=True),
    *sharded(4, 16, asked=2, sticky=True),
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
