"""The planner: exact means exact, and the heuristic is never better."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.planner import Costs, Plan, chain, exact, heuristic, layout_cost, no_pipeline
from tailrace.policy.cascade.qoe import QoeModel, features
from tailrace.policy.cascade.workload import Workload, bucket_edges
from tailrace.profiles import load_profile
from tests.policy.fleets import quick

PROFILE = load_profile("llama-3.1-8b-h100")
MODEL = QoeModel.of_profile(PROFILE)
lengths = st.lists(st.tuples(st.integers(1, 3_000), st.integers(1, 3_000)), min_size=1, max_size=60)
models = st.tuples(*(st.floats(0, 1) for _ in range(5))).map(
    lambda d: QoeModel((d[0], d[1] / 10, d[2] / 1e3, d[3] / 1e6, d[4] / 1e3))
)


def layouts(buckets: int, instances: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All cuts and all ways to give each stage at least one instance."""
    for stages in range(1, min(buckets, instances) + 1):
        for cuts in itertools.combinations(range(1, buckets), stages - 1):
            for splits in itertools.combinations(range(1, instances), stages - 1):
                parts = (0, *splits, instances)
                yield (0, *cuts, buckets), tuple(b - a for a, b in itertools.pairwise(parts))


@settings(quick, max_examples=60)
@given(
    rows=lengths,
    model=models,
    instances=st.integers(1, 5),
    transfer=st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
    history=st.booleans(),
)
def test_exact_is_the_best_there_is(
    rows: list[tuple[int, int]], model: QoeModel, instances: int, transfer: float, history: bool
) -> None:
    edges = bucket_edges(6_001, growth=4.0)
    inputs, outputs = [r[0] for r in rows], [r[1] for r in rows]
    if history:
        workload = Workload.of_history(edges, inputs, outputs, 50.0)
    else:
        workload = Workload.of_snapshot(edges, inputs, [i + o for i, o in rows])
    costs = Costs(workload, model, transfer)
    found = exact(costs, instances)
    all_costs = [costs.plan(*layout).cost for layout in layouts(costs.buckets, instances)]
    best = min(all_costs)
    assert found.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    for other in (heuristic, chain, no_pipeline):
        plan = other(costs, instances)
        assert plan.cost >= found.cost * (1 - 1e-9) - 1e-12
        assert_whole(plan, instances)
        assert layout_cost(workload, model, transfer, plan.cuts, plan.counts) == pytest.approx(
            plan.cost, rel=1e-9, abs=1e-12
        )
    assert heuristic(costs, instances).cost <= chain(costs, instances).cost + 1e-12
    assert_whole(found, instances)


def assert_whole(plan: Plan, instances: int) -> None:
    """The plan tiles the lengths and uses every instance once."""
    names = [f"w{n}" for n in range(instances)]
    stages = plan.stages(names)
    assert tiles(stages, 6_001)
    assert [name for stage in stages for name in stage.instance_ids] == names


@quick
@given(instances=st.integers(1, 40))
def test_layouts_of_the_baselines(instances: int) -> None:
    costs = some_costs(instances)
    assert no_pipeline(costs, instances).counts == (instances,)
    assert len(chain(costs, instances).counts) == min(instances, costs.buckets)


@quick
@given(rows=lengths)
def test_a_stage_of_one_costs_what_the_model_says(rows: list[tuple[int, int]]) -> None:
    """Prefix sums against Eq. (1)."""
    inputs, now = [r[0] for r in rows], [i + o for i, o in rows]
    edges = bucket_edges(6_001)
    costs = Costs(Workload.of_snapshot(edges, inputs, now), MODEL, 0.0)
    for lo, hi in itertools.combinations(range(0, len(edges), 3), 2):
        inside = [(i, n) for i, n in zip(inputs, now, strict=True) if edges[lo] <= n < edges[hi]]
        batch = features([i for i, _ in inside], [n for _, n in inside])
        assert costs.stage(lo, hi, 1) == pytest.approx(MODEL.batch(batch), abs=1e-9)


@quick
@given(rows=lengths, in_flight=st.floats(1, 1_000))
def test_history_is_in_flight_where_its_tokens_are_made(
    rows: list[tuple[int, int]], in_flight: float
) -> None:
    edges = bucket_edges(6_001)
    workload = Workload.of_history(edges, [r[0] for r in rows], [r[1] for r in rows], in_flight)
    assert workload.requests == pytest.approx(in_flight)
    total = sum(o for _, o in rows)
    at = 4
    made = sum(max(0, min(i + o, edges[at + 1]) - max(i, edges[at])) for i, o in rows)
    assert workload.sums[at, 0] == pytest.approx(in_flight * made / total)


def some_costs(instances: int) -> Costs:
    """ShareGPT-like lengths with a long tail, 60 requests an instance."""
    rng = np.random.default_rng(1)
    inputs = (np.minimum(rng.lognormal(5, 1.5, 5_000), 100_000) + 1).astype(int).tolist()
    outputs = (np.minimum(rng.lognormal(5, 1, 5_000), 30_000) + 1).astype(int).tolist()
    workload = Workload.of_history(bucket_edges(131_072), inputs, outputs, 60.0 * instances)
    return Costs(workload, MODEL, PROFILE.kv_bytes_per_token / 50e9)


def test_a_pipeline_pays_for_a_long_tail() -> None:
    costs = some_costs(16)
    found = exact(costs, 16)
    assert len(found.counts) > 1
    assert found.cost < 0.95 * no_pipeline(costs, 16).cost
    assert found.cost < 0.95 * chain(costs, 16).cost


@pytest.mark.parametrize("plan", [exact, heuristic, chain, no_pipeline])
def test_no_instances(plan: Callable[[Costs, int], Plan]) -> None:
    with pytest.raises(ValueError, match="instance"):
        plan(some_costs(1), 0)


def test_no_buckets() -> None:
    for wrong in ((0, 2.0), (10, 1.0)):
        with pytest.raises(ValueError, match="buckets"):
            bucket_edges(*wrong)
    with pytest.raises(ValueError, match="2 instances"):
        exact(some_costs(3), 3).stages(["a", "b"])
