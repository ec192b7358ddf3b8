"""Dispatch by column selects what a comparison of all instances selects, whatever was decided before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Arrival, ClusterView
from tailrace.policy.cascade.dispatch import LeastDemand, demand_share
from tailrace.policy.cascade.layout import active_in
from tests.policy.fleets import fleets, quick

SELECTOR = LeastDemand()


@quick
@given(view=fleets(staged=True), excluded=st.frozensets(st.sampled_from(["w0", "w1", "w2"])))
def test_the_least_demand_is_that_of_all_instances(view: ClusterView, excluded: frozenset[str]) -> None:
    arrival = Arrival("r", 100, 1_000, 0, excluded=excluded)
    for stage in (None, *view.stages, *view.stages):
        among = view.placeable() if stage is None else active_in(view, stage)
        usable = [i for i in among if i.instance_id not in arrival.excluded]
        expected = min(usable, key=lambda i: (demand_share(i), i.load, i.instance_id), default=None)
        if stage is None:
            assert SELECTOR.of_all(view, excluded) is expected
        else:
            assert SELECTOR.of_stage(view, stage, excluded) is expected
