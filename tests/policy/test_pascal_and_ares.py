"""Properties of every PASCAL and ARES policy and their baselines on any cluster."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MappingProxyType

import pytest
from hypothesis import given, settings

from tailrace.actions import Action, Migrate, Place, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceState, Pool
from tailrace.policy.ares.policy import CURRENT_LOAD, OFF, Ares
from tailrace.policy.base import Policy
from tailrace.policy.candidates import kv_needed_tokens
from tailrace.policy.least_loaded import FOOTPRINT, LeastLoaded
from tailrace.policy.pascal import ALWAYS, NEVER, Pascal
from tailrace.policy.registry import load
from tests.policy.clusters import arrivals, clusters

NAMES: dict[str, Callable[[], Policy]] = {
    "least_loaded load=footprint": partial(LeastLoaded, load=FOOTPRINT),
    "pascal": Pascal,
    "pascal migration=never": partial(Pascal, migration=NEVER),
    "pascal migration=always": partial(Pascal, migration=ALWAYS),
    "ares rescheduling=off": partial(Ares, rescheduling=OFF),
    "ares": Ares,
    "ares rescheduling=current_load": partial(Ares, rescheduling=CURRENT_LOAD),
}
POLICIES: list[Callable[[], Policy]] = [*NAMES.values(), lambda: Ares(migrations_per_tick=4)]


def decisions(policy: Policy, view: ClusterView) -> Iterator[Sequence[Action]]:
    """Yield the policy's actions at every decision point except arrival."""
    yield policy.on_tick(view, 0.0)
    for instance in view.instances.values():
        for request in instance.requests:
            yield policy.on_prefill_done(view, request, 0.0)
            yield policy.on_reasoning_ended(view, request, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_policies_are_registered_by_name(name: str) -> None:
    policy, expected = load(name), NAMES[name]()
    assert type(policy) is type(expected)
    # Ablations differ only in their parameters.
    plain = {
        name: value for name, value in vars(expected).items() if isinstance(value, bool | int | float | str)
    }
    assert plain.items() <= vars(policy).items()
    assert policy.summary


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=40)
@given(view=clusters(), arrival=arrivals)
def test_arrivals_are_placed_on_a_live_instance(
    make: Callable[[], Policy], view: ClusterView, arrival: Arrival
) -> None:
    allowed = {i.instance_id for i in view.placeable()} - arrival.excluded
    placement = make().place(view, arrival, 0.0)
    if allowed:
        assert isinstance(placement, Place) and placement.instance_id in allowed
    else:
        assert isinstance(placement, Refuse)


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=40)
@given(view=clusters())
def test_migrations_are_possible_in_the_view(make: Callable[[], Policy], view: ClusterView) -> None:
    for actions in decisions(make(), view):
        sent: dict[str, int] = defaultdict(int)
        moved: set[str] = set()
        for action in actions:
            assert isinstance(action, Migrate)
            source, target = view.instances[action.source_id], view.instances[action.target_id]
            request = next(r for r in source.requests if r.request_id == action.request_id)
            assert target is not source
            assert target.state is InstanceState.ACTIVE
            assert not request.migrating and request.request_id not in moved
            moved.add(request.request_id)
            assert target.max_model_len == 0 or request.context_tokens < target.max_model_len
            sent[target.instance_id] += kv_needed_tokens(request.context_tokens, target.block_tokens)
        for name, tokens in sent.items():
            target = view.instances[name]
            host_free = target.host_kv_capacity_tokens - target.host_kv_tokens
            assert tokens <= max(target.kv_free_tokens, host_free)


@pytest.mark.parametrize("make", [make for name, make in NAMES.items() if name.startswith("ares")])
@settings(max_examples=40)
@given(view=clusters())
def test_ares_migrates_only_to_decode_instances_with_device_memory(
    make: Callable[[], Policy], view: ClusterView
) -> None:
    for actions in decisions(make(), view):
        for action in actions:
            assert isinstance(action, Migrate)
            target = view.instances[action.target_id]
            assert target.pool not in (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
            request = next(
                r for r in view.instances[action.source_id].requests if r.request_id == action.request_id
            )
            assert kv_needed_tokens(request.context_tokens, target.block_tokens) <= target.kv_free_tokens


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=40)
@given(view=clusters(), arrival=arrivals)
def test_decisions_are_deterministic(make: Callable[[], Policy], view: ClusterView, arrival: Arrival) -> None:
    again = ClusterView(
        MappingProxyType({name: dataclasses.replace(i) for name, i in view.instances.items()})
    )
    assert make().place(view, arrival, 0.0) == make().place(again, arrival, 5.0)
    assert list(decisions(make(), view)) == list(decisions(make(), again))
