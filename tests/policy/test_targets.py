"""Targets that Arrow and ARES select by column are those that a comparison of all instances selects."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy import columns
from tailrace.policy.ares.policy import Ares, LeastKvLoad, decoders, kv_load
from tailrace.policy.arrow.load import DecodeTargets, LoadModel, PrefillTargets, running_tokens
from tailrace.policy.arrow.policy import PROFILE, Arrow
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.candidates import Ledger, fits_device
from tailrace.profiles import load_profile
from tests.policy.fleets import MAX_LENGTH, cluster, fleets, quick

LOADS = LoadModel(TtftPredictor.of_profile(load_profile(PROFILE)), 100_000)
# Each is asked about one fleet after another, so that what they keep of earlier ones would be noticed.
PREFILL = PrefillTargets(LOADS)
DECODE = {needs_room: DecodeTargets(needs_room) for needs_room in (False, True)}
LEAST_KV_LOAD = LeastKvLoad()
POLICIES = (Arrow(), Arrow(ttft_slo_s=0.5, tpot_slo_s=0.05), Arrow(room="filter"), Ares())


def varied(seed: int, view: ClusterView) -> ClusterView:
    """Return the fleet with delays that are equal now and then, and different block sizes and limits."""
    rng = random.Random(seed)

    def changed(i: InstanceView) -> InstanceView:
        return replace(
            i,
            block_tokens=rng.choice((16, 16, 32, 0)),
            max_model_len=rng.choice((0, MAX_LENGTH, MAX_LENGTH, 20_000)),
            prefill_delay_s=rng.choice((None, 0.0, 0.0, 1.0)),
            prefill_backlog_tokens=rng.choice((0, i.prefill_backlog_tokens)),
            coming_tokens=rng.choice((0, 5_000)),
        )

    return cluster(*map(changed, view.instances.values()))


VIEWS = st.builds(varied, st.integers(0, 2**32), fleets(pools=(None, *Pool)))


@quick
@given(view=VIEWS, excluded=st.frozensets(st.sampled_from(["w0", "w1", "w2"])))
def test_arrow_prefills_where_the_delay_is_the_least(view: ClusterView, excluded: frozenset[str]) -> None:
    pools = Pools.of(view, excluded)
    expected = [
        min(among, key=lambda i: (LOADS.prefill_delay_s(i), i.load), default=None)
        for among in (pools.prefill + pools.unpooled, pools.decode_to_prefill)
    ]
    found = PREFILL.least_delays(view, excluded)
    assert [target for _, target in found] == expected
    for delay_s, target in found:
        assert target is None or delay_s == LOADS.prefill_delay_s(target)


@quick
@pytest.mark.parametrize("needs_room", [False, True])
@given(view=VIEWS)
def test_arrow_decodes_where_the_fewest_tokens_run(needs_room: bool, view: ClusterView) -> None:
    pools, ledger = Pools.of(view), Ledger(view.instances, None, None)
    may_get = ledger.may_receive if needs_room else ledger.may_queue
    for request in [r for i in view.instances.values() for r in i.requests]:
        expected = tuple(
            min((i for i in among if may_get(i, request)), key=running_tokens, default=None)
            for among in (pools.decode, pools.prefill_to_decode)
        )
        assert DECODE[needs_room].least_tokens(view, request) == expected


@quick
@given(view=VIEWS)
def test_ares_decodes_where_the_kv_load_is_the_least(view: ClusterView) -> None:
    able = decoders(view.placeable())
    for request in [r for i in view.instances.values() for r in i.requests]:
        others = [i for i in able if i.instance_id != request.instance_id]
        with_room = [i for i in others if fits_device(i, request.context_tokens)]
        expected = min(with_room, key=kv_load, default=None)
        assert LEAST_KV_LOAD.for_request(view, request) is expected


@quick
@given(view=VIEWS, prompt=st.integers(1, 50_000), excluded=st.frozensets(st.sampled_from(["w0", "w1"])))
def test_the_number_of_instances_from_which_columns_are_used_affects_no_decision(
    view: ClusterView, prompt: int, excluded: frozenset[str]
) -> None:
    arrival = Arrival("new", prompt, 100, 0, excluded=excluded)
    requests = [r for i in view.instances.values() for r in i.requests]
    for policy in POLICIES:
        decided = []
        for least in (0, 1_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(columns, "COLUMNS_MIN", least)
                handovers = [list(policy.on_prefill_done(view, r, 0.0)) for r in requests]
                decided.append((policy.place(view, arrival, 0.0), handovers))
        assert decided[0] == decided[1]
