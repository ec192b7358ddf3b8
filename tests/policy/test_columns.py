"""Columns of a cluster's instances are always those of the current view, whatever was read before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Arrival, ClusterView, InstanceView
from tailrace.policy.columns import Columns, SeenInstances, smallest
from tailrace.policy.pascal import Pascal
from tests.policy.clusters import clusters


def read(instance: InstanceView) -> tuple[float, float]:
    return instance.running, instance.waiting


# The instances of successive views: ids, and the running requests of each.
SUCCESSIONS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), max_size=4), min_size=1, max_size=6
)


@given(views=SUCCESSIONS)
def test_columns_equal_what_a_new_reader_reads(views: list[dict[str, int]]) -> None:
    columns = Columns(read, 2)
    before: dict[str, InstanceView] = {}
    for loads in views:
        now = {name: InstanceView(name, running=running) for name, running in sorted(loads.items())}
        # An instance that did not change keeps its view.
        instances = [before[name] if before.get(name) == view else view for name, view in now.items()]
        before = {view.instance_id: view for view in instances}
        expected = Columns(read, 2).update(instances)
        assert columns.update(instances).shape == (2, len(instances))
        assert np.array_equal(columns.update(instances), expected)
        assert [view.instance_id for view in columns.seen.views] == list(columns.seen.at)


def test_only_changed_instances_are_read_again() -> None:
    reads: list[str] = []

    def counted(instance: InstanceView) -> Sequence[float]:
        reads.append(instance.instance_id)
        return (instance.running,)

    columns = Columns(counted, 1)
    first, second = InstanceView("a"), InstanceView("b")
    columns.update([first, second])
    columns.update([first, replace(second, running=3)])
    assert reads == ["a", "b", "b"]


def test_an_instance_that_could_not_be_read_is_read_again() -> None:
    def refuse(instance: InstanceView) -> Sequence[float]:
        if instance.running < 0:
            raise ValueError("negative")
        return (instance.running,)

    columns, first = Columns(refuse, 1), InstanceView("a", running=1)
    columns.update([first])
    broken = InstanceView("a", running=-1)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            columns.update([broken])
    assert columns.update([first]).tolist() == [[1.0]]


def test_another_order_forgets_all_positions() -> None:
    first, second = InstanceView("a"), InstanceView("b")
    seen = SeenInstances()
    assert seen.changed([first, second]) is None
    seen.replace([first, second])
    assert seen.changed([first, second]) == []
    assert seen.changed([second, first]) is None
    seen.replace([second, first])
    assert seen.at == {"b": 0, "a": 1}


def test_the_first_of_equals_is_the_smallest() -> None:
    values = np.array([0.0, 2.0, 1.0, 1.0])
    assert smallest(values, np.array([False, True, True, True])) == 2


@given(views=st.lists(clusters(active=True, least=1), min_size=2, max_size=4))
def test_earlier_views_do_not_affect_a_placement(views: list[ClusterView]) -> None:
    used = Pascal()
    for view in views:
        arrival = Arrival("new", 100, 1_000, 0)
        assert used.place(view, arrival, 0.0) == Pascal().place(view, arrival, 0.0)
