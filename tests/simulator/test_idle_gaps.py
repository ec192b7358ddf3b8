"""Long gaps without requests are skipped at little cost and without effect on results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from simulator.cluster import ClusterSpec, ReportSpec
from simulator.records import SimResult
from simulator.request import SimRequest
from simulator.simulation import Simulation, simulate
from tailrace.actions import Action, SetPool
from tailrace.cluster import ClusterView, Pool
from tailrace.intra.orders import Fcfs
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.registry import load
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import PROFILE

SPEC = ClusterSpec.uniform(4, PROFILE)
QUIET_S = 30.0


def _bursts(*begins_s: float, count: int = 24) -> list[SimRequest]:
    return [
        SimRequest(f"{burst}-{n}", begin_s + n * 0.0531, 20 + n * 37 % 200, (n % 3) * 40, 1 + n * 53 % 150)
        for burst, begin_s in enumerate(begins_s)
        for n in range(count)
    ]


def _run(
    policy: Policy, requests: Sequence[SimRequest], quiet_s: float, spec: ClusterSpec = SPEC
) -> SimResult:
    simulation = Simulation(spec, requests, policy, Fcfs(), seed=5, sample_interval_s=3.0, quiet_s=quiet_s)
    return simulation.run(None)


def _same(one: SimResult, other: SimResult) -> bool:
    return (
        one.requests == other.requests
        and one.migrations == other.migrations
        and one.end_s == other.end_s
        and one.series.times_s.tolist() == other.series.times_s.tolist()
        and one.series.kv_used_tokens.tolist() == other.series.kv_used_tokens.tolist()
        and one.series.pools == other.series.pools
        and one.series.stages == other.series.stages
    )


@pytest.mark.parametrize("name", ["pascal", "ares", "arrow", "cascade", "tailrace"])
def test_skipped_ticks_and_reports_change_no_result(name: str) -> None:
    spec = (
        SPEC.with_pools([Pool.PREFILL, Pool.PREFILL, Pool.DECODE, Pool.DECODE]) if name == "arrow" else SPEC
    )
    # Odd start times, so that ticks and reports align differently with each burst.
    requests = _bursts(200.017, 1_000.391, 2_213.7)
    policy = load(name)
    complete, skipped = (_run(policy, requests, quiet_s, spec) for quiet_s in (math.inf, QUIET_S))
    assert _same(complete, skipped)
    assert skipped.events_processed < 0.7 * complete.events_processed


def test_a_policy_that_moves_everything_gets_the_same_ticks() -> None:
    requests = _bursts(0.0, 1_000.391)
    complete, skipped = (_run(MoveEverything(), requests, quiet_s) for quiet_s in (math.inf, QUIET_S))
    assert complete.migrations
    assert _same(complete, skipped)


def test_late_reports_are_not_skipped() -> None:
    # A report in transit at the start of a burst corrects the scheduler's view of it.
    spec = replace(SPEC, report=ReportSpec(interval_s=0.7, delay_s=1.9))
    requests = _bursts(0.0, 1_000.391)
    complete, skipped = (_run(LeastLoaded(), requests, quiet_s, spec) for quiet_s in (math.inf, QUIET_S))
    assert _same(complete, skipped)


def test_a_day_without_requests_takes_few_events() -> None:
    requests = _bursts(0.0, 100_000.0, 200_000.0, count=4)
    result = simulate(SPEC, requests, load("arrow"), Fcfs())
    assert all(record.finish_s is not None for record in result.requests)
    # Ten quiet minutes after each burst, with two ticks, and four reports and their arrivals, per second.
    assert result.events_processed < 20_000


class _ActLate(LeastLoaded):
    """Move an instance to a pool some time after the last request, and record the ticks."""

    tick_interval_s = 0.5

    def __init__(self, act_s: float) -> None:
        self._act_s = act_s
        self.ticks: list[tuple[float | None, float]] = []

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        self.ticks.append((view.last_tick_s, now))
        if view.instances["i000"].pool is None and now > self._act_s:
            return (SetPool("i000", Pool.DECODE),)
        return ()


def test_an_action_restarts_the_quiet_time() -> None:
    policy = _ActLate(act_s=500.0)
    result = simulate(SPEC, _bursts(0.0, 10_000.0), policy, Fcfs())
    assert [(change.at_s, change.instance_id) for change in result.series.pools[4:]] == [(500.5, "i000")]
    at_s = [now for _, now in policy.ticks]
    assert sum(now < 5_000.0 for now in at_s) == pytest.approx(2 * 1_100.0, abs=3)


def test_ticks_around_a_gap_are_the_same_as_without_skipping() -> None:
    requests = _bursts(0.0, 3_000.1)
    skipping, every = _ActLate(math.inf), _ActLate(math.inf)
    _run(skipping, requests, QUIET_S)
    _run(every, requests, math.inf)
    assert set(skipping.ticks) < set(every.ticks)
    before = max(now for _, now in skipping.ticks if now < 3_000.1)
    assert before == max(now for _, now in every.ticks if now < 3_000.1)
    assert skipping.ticks[-1] == every.ticks[-1]
