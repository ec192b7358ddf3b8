"""Test the policy's decisions on clusters made by hand: no simulator, no services."""

from __future__ import annotations

from my_policy.headroom import Headroom

from tailrace.actions import Migrate, Place, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, RequestState, RequestView


def cluster(**used: int) -> ClusterView:
    """Return instances with 1,000 tokens of KV each, of which this many are in use."""
    instances = {
        name: InstanceView(name, kv_capacity_tokens=1_000, kv_used_tokens=tokens)
        for name, tokens in sorted(used.items())
    }
    return ClusterView(instances)


ARRIVAL = Arrival("new", prompt_tokens=10, max_tokens=100, seq=0)
ANSWERING = RequestView("r", "a", Phase.ANSWERING, RequestState.RUNNING, 10, 90, 100)


def test_arrivals_go_where_most_is_free() -> None:
    assert Headroom().place(cluster(a=600, b=200, c=700), ARRIVAL, now=0.0) == Place("b")


def test_without_instances_requests_are_refused() -> None:
    assert isinstance(Headroom().place(ClusterView({}), ARRIVAL, now=0.0), Refuse)


def test_an_answer_leaves_a_full_instance_for_the_roomiest() -> None:
    moves = Headroom().on_reasoning_ended(cluster(a=950, b=500, c=300), ANSWERING, now=0.0)
    assert moves == [Migrate("r", "a", "c", "room to answer")]


def test_an_answer_stays_where_there_is_room_and_where_there_is_none_elsewhere() -> None:
    assert not Headroom().on_reasoning_ended(cluster(a=800, b=100), ANSWERING, now=0.0)
    assert not Headroom().on_reasoning_ended(cluster(a=950, b=900), ANSWERING, now=0.0)
