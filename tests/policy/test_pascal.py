"""PASCAL's Algorithms 1 and 2 and adaptive migration, compared with direct implementations."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
from hypothesis import given

from tailrace.actions import Migrate, Place
from tailrace.cluster import (
    Arrival,
    CachedTokens,
    ClusterView,
    InstanceView,
    Phase,
    PhaseLoad,
    RequestState,
    RequestView,
)
from tailrace.policy.least_loaded import FOOTPRINT, LeastLoaded
from tailrace.policy.pascal import ALWAYS, NEVER, Pascal
from tests.policy.clusters import arrivals, clusters


def meets_slo(instance: InstanceView) -> bool:
    """Return t_i of the paper."""
    answering = [r for r in instance.requests if r.phase is Phase.ANSWERING]
    return all(
        not unfed(r) if r.pacer_slack_tokens is None else r.pacer_slack_tokens > -1.0 for r in answering
    )


def unfed(request: RequestView) -> bool:
    """Return whether the request waits off the device for its first answering token."""
    return not request.phase_tokens and request.state in (RequestState.WAITING, RequestState.PREEMPTED)


def footprint(instance: InstanceView) -> int:
    """Return m_i of the paper."""
    return instance.kv_used_tokens + instance.host_kv_tokens + instance.prefill_backlog_tokens


def reasoning(instance: InstanceView) -> int:
    """Return r_i of the paper."""
    return sum(r.phase is not Phase.ANSWERING and not r.demoted for r in instance.requests)


def fresh(instance: InstanceView) -> int:
    """Return a_i of the paper."""
    return sum(r.phase is Phase.ANSWERING and r.phase_tokens < 500 for r in instance.requests)


def without(instance: InstanceView, request: RequestView) -> InstanceView:
    """Return the instance without the request."""
    rest = tuple(r for r in instance.requests if r.request_id != request.request_id)
    return dataclasses.replace(instance, requests=rest)


@given(view=clusters(), arrival=arrivals)
def test_algorithm_1_chooses_the_minimum(view: ClusterView, arrival: Arrival) -> None:
    instances = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
    if not instances:
        return
    eligible = [i for i in instances if meets_slo(i)] or instances
    placement = Pascal(migration=NEVER).place(view, arrival, 0.0)
    assert isinstance(placement, Place)
    chosen = view.instances[placement.instance_id]
    assert chosen in eligible
    assert footprint(chosen) == min(map(footprint, eligible))
    assert Pascal().place(view, arrival, 0.0) == placement


@given(view=clusters(), arrival=arrivals)
def test_baselines_choose_the_smallest_footprint(view: ClusterView, arrival: Arrival) -> None:
    instances = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
    placement = LeastLoaded(load=FOOTPRINT).place(view, arrival, 0.0)
    if isinstance(placement, Place):
        assert footprint(view.instances[placement.instance_id]) == min(map(footprint, instances))


def check_algorithm_2(view: ClusterView) -> None:
    for source in view.instances.values():
        for request in source.requests:
            instances = [without(i, request) for i in view.instances.values()]
            eligible = [i for i in instances if meets_slo(i)]
            rank = {i.instance_id: reasoning(i) for i in eligible}
            if not eligible:
                rank = {i.instance_id: reasoning(i) + fresh(i) for i in instances}
            chosen = Pascal(migration=ALWAYS).select(view, source, request)
            assert chosen is not None
            least = min(rank.values())
            assert rank[chosen.instance_id] == least
            if rank.get(source.instance_id) == least:
                assert chosen is source


@given(view=clusters(active=True, least=1))
def test_algorithm_2_chooses_the_minimum(view: ClusterView) -> None:
    check_algorithm_2(view)


@given(view=clusters(active=True, least=2))
def test_algorithm_2_chooses_the_minimum_if_every_instance_misses_its_slo(view: ClusterView) -> None:
    late = {
        name: dataclasses.replace(i, requests=(*i.requests, answering(f"late-{name}", name, 100, slack=-5.0)))
        for name, i in view.instances.items()
    }
    check_algorithm_2(dataclasses.replace(view, instances=MappingProxyType(late)))


def answering(request_id: str, instance_id: str, context: int, slack: float = 5.0) -> RequestView:
    return RequestView(
        request_id=request_id,
        instance_id=instance_id,
        phase=Phase.ANSWERING,
        state=RequestState.RUNNING,
        prompt_tokens=context,
        output_tokens=0,
        max_tokens=32_768,
        kv_tokens=context,
        pacer_slack_tokens=slack,
        phase_tokens=600,
    )


@pytest.mark.parametrize(("slack", "target"), [(5.0, "w2"), (-5.0, "w1")])
def test_fresh_answering_requests_count_if_every_instance_misses_its_slo(slack: float, target: str) -> None:
    def loaded(name: str, reasoning: int, fresh: int) -> InstanceView:
        """Return an instance that also has an answering request that is not fresh."""
        last = answering(f"{name}-last", name, 100, slack)
        held = [
            *(dataclasses.replace(last, request_id=f"r{n}", phase=Phase.REASONING) for n in range(reasoning)),
            *(dataclasses.replace(last, request_id=f"f{n}", phase_tokens=100) for n in range(fresh)),
        ]
        return InstanceView(name, kv_capacity_tokens=10_000, requests=(last, *held))

    source, *others = loaded("w0", 4, 0), loaded("w1", 2, 0), loaded("w2", 1, 2)
    view = ClusterView({view.instance_id: view for view in (source, *others)})
    chosen = Pascal().select(view, source, answering("r", "w0", 1_000))
    assert chosen is not None and chosen.instance_id == target


def two_instances(free_here: int, free_there: int, host: int = 0) -> tuple[ClusterView, RequestView]:
    """Return w0 with a request of 1,000 tokens and a reasoning one, and an empty w1, as in figure 7."""
    request = answering("r", "w0", 1_000)
    other = dataclasses.replace(answering("s", "w0", 100), phase=Phase.REASONING)
    here = InstanceView(
        "w0", kv_capacity_tokens=10_000, kv_used_tokens=10_000 - free_here, requests=(request, other)
    )
    there = InstanceView(
        "w1",
        kv_capacity_tokens=10_000,
        kv_used_tokens=10_000 - free_there,
        host_kv_capacity_tokens=host,
    )
    return ClusterView(MappingProxyType({"w0": here, "w1": there})), request


@pytest.mark.parametrize(
    ("free_here", "free_there", "host", "non_adaptive", "adaptive"),
    [
        (5_000, 5_000, 0, True, True),
        # Room for the request but not for its answer.
        (5_000, 1_100, 0, True, False),
        # Figure 7: the target's device is full.
        (5_000, 0, 50_000, True, False),
        # No instance has free memory: Algorithm 2 decides, and the request waits in host memory.
        (0, 0, 50_000, True, True),
        # No instance has free memory, and the target has no host memory either.
        (0, 0, 0, False, False),
        (0, 1_100, 0, True, True),
    ],
)
def test_adaptive_migration(
    free_here: int, free_there: int, host: int, non_adaptive: bool, adaptive: bool
) -> None:
    view, request = two_instances(free_here, free_there, host)
    migration = Migrate("r", "w0", "w1", "reasoning ended")
    assert list(Pascal(migration=ALWAYS).on_reasoning_ended(view, request, 0.0)) == [migration] * non_adaptive
    assert list(Pascal().on_reasoning_ended(view, request, 0.0)) == [migration] * adaptive
    assert not Pascal(migration=NEVER).on_reasoning_ended(view, request, 0.0)


@pytest.mark.parametrize(("kv_tokens", "lacking"), [(1_008, 0), (400, 600)])
def test_a_request_stays_where_its_growth_fits(kv_tokens: int, lacking: int) -> None:
    """The need is its growth plus its KV off the device; a partly filled block does not reduce it."""
    pascal = Pascal()
    request = dataclasses.replace(answering("r", "w0", 1_000), kv_tokens=kv_tokens)
    free = lacking + pascal.growth_tokens
    here = InstanceView("w0", kv_capacity_tokens=10_000, kv_used_tokens=10_000 - free, requests=(request,))
    there = InstanceView(
        "w1", kv_capacity_tokens=10_000, kv_used_tokens=10_000, host_kv_capacity_tokens=50_000
    )
    assert pascal.stays(here, there, request)
    less = dataclasses.replace(here, kv_used_tokens=here.kv_used_tokens + 1)
    assert not pascal.stays(less, there, request)


def test_nothing_is_migrated_in_an_idle_cluster() -> None:
    request = answering("r", "w1", 1_000)
    here = InstanceView("w1", kv_capacity_tokens=10_000, kv_used_tokens=1_008, requests=(request,))
    view = ClusterView(MappingProxyType({"w0": InstanceView("w0", kv_capacity_tokens=10_000), "w1": here}))
    assert not Pascal().on_reasoning_ended(view, request, 0.0)


def test_the_request_itself_is_not_counted_against_its_instance() -> None:
    # The last report still shows it reasoning.
    reported = dataclasses.replace(answering("r", "w1", 1_000), phase=Phase.REASONING)
    here = InstanceView("w1", kv_capacity_tokens=10_000, kv_used_tokens=1_008, requests=(reported,))
    view = ClusterView(MappingProxyType({"w0": InstanceView("w0", kv_capacity_tokens=10_000), "w1": here}))
    assert not Pascal().on_reasoning_ended(view, answering("r", "w1", 1_000), 0.0)


def test_a_burst_between_two_reports_is_distributed() -> None:
    """Placements count immediately, as prefill backlog."""
    views = {n: InstanceView(n, kv_capacity_tokens=10_000) for n in ("w0", "w1", "w2")}
    placed = []
    for seq in range(6):
        placement = Pascal().place(ClusterView(views), Arrival(f"r{seq}", 100, 1_000, seq), 0.0)
        assert isinstance(placement, Place)
        placed.append(placement.instance_id)
        chosen = views[placement.instance_id]
        views[placement.instance_id] = dataclasses.replace(
            chosen, prefill_backlog_tokens=chosen.prefill_backlog_tokens + 100
        )
    assert placed == ["w0", "w1", "w2"] * 2


def test_cached_tokens_count_for_an_instance_if_cache_aware() -> None:
    view = ClusterView(
        MappingProxyType(
            {
                "a": InstanceView("a", kv_capacity_tokens=10_000, kv_used_tokens=1_000),
                "b": InstanceView("b", kv_capacity_tokens=10_000, kv_used_tokens=1_100),
            }
        )
    )
    arrival = Arrival("new", 1_000, 100, 0, cached={"b": CachedTokens(500, 500)})
    assert Pascal(cache_aware=True).place(view, arrival, 0.0) == Place("b")
    assert Pascal().place(view, arrival, 0.0) == Place("a")


def test_fresh_answers_are_counted_by_the_quantum() -> None:
    requests = (dataclasses.replace(answering("r", "a", 100), phase_tokens=300),)
    view = InstanceView("a", requests=requests)
    assert Pascal(quantum_tokens=300).load_of(view) == PhaseLoad(0, 0, 5.0, quantum_tokens=300)
    assert Pascal(quantum_tokens=301).load_of(view) == PhaseLoad(0, 1, 5.0, quantum_tokens=301)


def test_a_quantum_has_at_least_one_token() -> None:
    request = dataclasses.replace(answering("r", "a", 100), phase_tokens=1)
    view = InstanceView("a", requests=(request, dataclasses.replace(request, phase_tokens=0)))
    assert Pascal(quantum_tokens=1).load_of(view).fresh_answering == 1
    with pytest.raises(ValueError, match="at least one token, not 0"):
        Pascal(quantum_tokens=0)
