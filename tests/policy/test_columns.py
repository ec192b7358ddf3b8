"""Columns of a cluster's instances are always those of the current view, whatever was read before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestView, ViewChanges
from tailrace.policy.columns import Columns, PerInstances, SeenInstances, smallest
from tailrace.policy.pascal import Pascal
from tests.policy.clusters import clusters
from tests.policy.fleets import cluster


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
        before = {name: before[name] if before.get(name) == view else view for name, view in now.items()}
        expected = Columns(read, 2).update(ClusterView(before))
        assert columns.update(ClusterView(before)).shape == (2, len(before))
        assert np.array_equal(columns.update(ClusterView(before)), expected)
        assert columns.seen.names == list(columns.seen.at) == list(before)


def test_only_changed_instances_are_read_again() -> None:
    reads: list[str] = []

    def counted(instance: InstanceView) -> Sequence[float]:
        reads.append(instance.instance_id)
        return (instance.running,)

    columns = Columns(counted, 1)
    first, second = InstanceView("a"), InstanceView("b")
    columns.update(cluster(first, second))
    columns.update(cluster(first, replace(second, running=3)))
    assert reads == ["a", "b", "b"]


def test_an_instance_that_could_not_be_read_is_read_again() -> None:
    def refuse(instance: InstanceView) -> Sequence[float]:
        if instance.running < 0:
            raise ValueError("negative")
        return (instance.running,)

    columns, first = Columns(refuse, 1), InstanceView("a", running=1)
    columns.update(cluster(first))
    broken = InstanceView("a", running=-1)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            columns.update(cluster(broken))
    assert columns.update(cluster(first)).tolist() == [[1.0]]


def test_another_order_forgets_all_positions() -> None:
    views = {name: InstanceView(name) for name in "ab"}
    first, second = ClusterView(views), ClusterView(dict(reversed(views.items())))
    seen = SeenInstances()
    assert seen.changed(first) is None
    seen.replace(first, None)
    assert seen.changed(first) == []
    assert seen.changed(second) is None
    seen.replace(second, None)
    assert seen.at == {"b": 0, "a": 1}


@given(
    renewals=st.lists(st.lists(st.sampled_from("abc"), max_size=3), max_size=12),
    skipped=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_recorded_changes_replace_a_comparison(renewals: list[list[str]], skipped: list[bool]) -> None:
    changes, columns = ViewChanges(), Columns(read, 2)
    views = {name: InstanceView(name) for name in "abc"}
    for number, (renewed, skip) in enumerate(zip(renewals, skipped, strict=False)):
        views = {
            name: replace(view, running=number) if name in renewed else view for name, view in views.items()
        }
        changes.add(renewed)
        view = ClusterView(views, changes=changes, version=changes.version)
        # Any number of views may lie between two decisions.
        if not skip:
            assert np.array_equal(columns.update(view), Columns(read, 2).update(ClusterView(views)))
            assert columns.seen.names == list(views)


def test_changes_that_are_not_remembered_are_compared() -> None:
    changes, columns = ViewChanges(), Columns(read, 2)
    first = ClusterView({"a": InstanceView("a")}, changes=changes, version=changes.version)
    columns.update(first)
    for _ in range(10_000):
        changes.add(["a"])
    later = ClusterView({"a": InstanceView("a", running=7)}, changes=changes, version=changes.version)
    assert changes.between(first.version, later.version) is None
    assert columns.update(later).tolist() == [[7.0], [0.0]]
    assert changes.between(later.version, later.version) == set()


def test_the_views_of_an_earlier_decision_are_not_kept() -> None:
    class Requests(list[RequestView]):
        """A list to which there can be a weak reference."""

    changes, columns = ViewChanges(), Columns(read, 2)
    requests = Requests()
    kept = weakref.ref(requests)
    columns.update(cluster_of(changes, InstanceView("a", requests=requests)))
    del requests
    assert kept() is None


def test_the_cache_of_instances_that_have_changed_is_not_kept() -> None:
    """Each change of the membership makes other changes of views."""
    made: list[weakref.ref[Columns]] = []

    def make() -> Columns:
        columns = Columns(read, 2)
        made.append(weakref.ref(columns))
        return columns

    caches = PerInstances(make)
    for _ in range(3):
        view = cluster_of(ViewChanges(), InstanceView("a"))
        caches.of(view).update(view)
    # All but that of views whose changes are not known, and the last one.
    assert [each() is not None for each in made] == [True, False, False, True]


def cluster_of(changes: ViewChanges, *instances: InstanceView) -> ClusterView:
    """Return a view whose changes are known."""
    return replace(cluster(*instances), changes=changes, version=changes.version)


def test_the_first_of_equals_is_the_smallest() -> None:
    values = np.array([0.0, 2.0, 1.0, 1.0])
    assert smallest(values, np.array([False, True, True, True])) == 2


@given(views=st.lists(clusters(active=True, least=1), min_size=2, max_size=4))
def test_earlier_views_do_not_affect_a_placement(views: list[ClusterView]) -> None:
    used = Pascal()
    for view in views:
        arrival = Arrival("new", 100, 1_000, 0)
        assert used.place(view, arrival, 0.0) == Pascal().place(view, arrival, 0.0)
