"""The planner: the exact plan is optimal, and the heuristic is never better."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.lengths import LengthStatistics
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.qoe_model import QoeModel, features
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.planner import Costs, Plan, chain, exact, heuristic, least_sums, no_pipeline
from tailrace.policy.cascade.planning import Engines, stage_work
from tailrace.policy.cascade.workload import Slowdown, Traffic, Workload, bucket_edges, bucket_of, with_cuts
from tailrace.profiles import load_profile
from tests.policy.fleets import instance, quick

PROFILE = load_profile("llama-3.1-8b-h100")
MODEL = QoeModel.of_profile(PROFILE)
ENGINES = Engines.of([instance("a"), replace(instance("b"), max_num_seqs=256)], PROFILE)
lengths = st.lists(st.tuples(st.integers(1, 3_000), st.integers(1, 3_000)), min_size=1, max_size=60)
models = st.tuples(*(st.floats(0, 1) for _ in range(5))).map(
    lambda d: QoeModel((d[0], d[1] / 10, d[2] / 1e3, d[3] / 1e6, d[4] / 1e3))
)


def layouts(buckets: int, instances: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield all cuts with all ways to give each stage at least one instance."""
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
    busy=st.sampled_from([None, 0.5, 1.0, 3.0]),
    penalty=st.sampled_from([None, "cascadeinfer-figure-2-step", "measured-rtx-pro-6000"]),
)
def test_the_exact_plan_is_the_best_of_all_feasible_plans(
    rows: list[tuple[int, int]],
    model: QoeModel,
    instances: int,
    transfer: float,
    busy: float | None,
    penalty: str | None,
) -> None:
    """`busy` is the work of the whole cluster per instance, in units of what one instance can do."""
    edges = bucket_edges(6_001, growth=4.0)
    traffic = Traffic.of_history(rows, 60.0)
    workload = traffic.in_flight(edges, 50.0)
    loaded = load_length_penalty(penalty) if penalty is not None else None
    slowdown = Slowdown.of(loaded, workload, 16) if loaded is not None else Slowdown()
    work = None
    if busy is not None:
        work = stage_work(traffic, edges, ENGINES, slowdown)
        work = work * (busy * instances / work[0, -1])
    costs = Costs(workload, model, transfer, slowdown, work, 1.0)
    found = exact(costs, instances)
    plans = [costs.plan(*layout) for layout in layouts(costs.buckets, instances)]
    feasible = [plan for plan in plans if costs.load(plan) <= 1.0 + 1e-9]
    best = min(plan.cost for plan in feasible or plans)
    assert found.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert not feasible or costs.load(found) <= 1.0 + 1e-6
    for other in (heuristic, chain, no_pipeline):
        plan = other(costs, instances)
        assert plan.cost >= min(p.cost for p in plans) * (1 - 1e-9) - 1e-12
        assert_complete(plan, instances)
        assert costs.layout(plan.cuts, plan.counts) == plan
    assert heuristic(costs, instances).cost <= chain(costs, instances).cost + 1e-12
    assert_complete(found, instances)
    # A chain gives every stage one instance and is the best of all such plans.
    if instances <= costs.buckets:
        one_each = [plan.cost for plan in plans if set(plan.counts) == {1}]
        assert chain(costs, instances).cost == pytest.approx(min(one_each), rel=1e-9, abs=1e-12)


def assert_complete(plan: Plan, instances: int) -> None:
    """Assert that the plan covers all lengths and uses every instance once."""
    names = [f"w{n}" for n in range(instances)]
    stages = plan.stages(names)
    assert tiles(stages, 6_001)
    assert [name for stage in stages for name in stage.instance_ids] == names


@quick
@given(seed=st.integers(0, 2**32), starts=st.integers(1, 4), most=st.sampled_from([16, 48]))
def test_least_sums_are_those_of_all_ways_to_divide_the_instances(seed: int, starts: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    # As f(e, l'): infinite for few instances, then decreasing, not necessarily convex.
    reach = np.sort(rng.choice([0.0, 1.0, 1e-3], (starts, most + 1)) * rng.random((starts, most + 1)))[
        :, ::-1
    ]
    reach[np.arange(most + 1) < rng.integers(0, most, (starts, 1))] = np.inf
    counts = np.arange(-most, most + 1)
    fixed, shared, least = rng.choice([0.0, 1.0, 30.0], (3, starts, 1)) * [[[0.1]], [[1.0]], [[1.0]]]
    with np.errstate(divide="ignore", invalid="ignore"):
        stages = np.where(counts < np.maximum(1, least), np.inf, fixed + shared / counts)
    wanted = [
        min(reach[start, j] + stages[start, most + e - j] for start in range(starts) for j in range(most + 1))
        for e in range(most + 1)
    ]
    assert least_sums(reach, stages) == pytest.approx(wanted, rel=1e-12)


@quick
@given(instances=st.integers(1, 40))
def test_stage_counts_of_the_baseline_plans(instances: int) -> None:
    costs = long_tail_costs(instances)
    assert no_pipeline(costs, instances).counts == (instances,)
    assert len(chain(costs, instances).counts) == min(instances, costs.buckets)


@settings(quick, max_examples=20)
@given(rows=lengths, model=models, instances=st.integers(4, 8))
def test_a_chain_adds_instances_beyond_its_buckets_where_they_help_most(
    rows: list[tuple[int, int]], model: QoeModel, instances: int
) -> None:
    edges = bucket_edges(6_001, growth=30.0)
    costs = Costs(Traffic.of_history(rows, 60.0).in_flight(edges, 50.0), model, 1e-5)
    assert costs.buckets == 4
    finest = [counts for cuts, counts in layouts(4, instances) if len(counts) == 4]
    found = chain(costs, instances)
    best = min(costs.plan(range(5), counts).cost for counts in finest)
    assert found.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert_complete(found, instances)


@quick
@given(rows=lengths)
def test_the_cost_of_a_single_instance_stage_follows_the_model(rows: list[tuple[int, int]]) -> None:
    """Prefix sums are compared with Eq. (1)."""
    inputs, now = [r[0] for r in rows], [i + o for i, o in rows]
    edges = bucket_edges(6_001)
    bucket = bucket_of(edges, np.array(now))
    sums = np.zeros((len(edges) - 1, 4))
    for at, i, n in zip(bucket, inputs, now, strict=True):
        sums[at] += (1, i, i * i, n)
    costs = Costs(Workload(edges, sums, np.zeros(len(edges))), MODEL, 0.0)
    for lo, hi in itertools.combinations(range(0, len(edges), 3), 2):
        inside = [(i, n) for i, n in zip(inputs, now, strict=True) if edges[lo] <= n < edges[hi]]
        batch = features([i for i, _ in inside], [n for _, n in inside])
        assert costs.stage(lo, hi, 1) == pytest.approx(MODEL.batch(batch), abs=1e-9)


@quick
@given(rows=lengths, in_flight=st.floats(1, 1_000))
def test_a_history_is_in_flight_at_the_lengths_where_it_generates_tokens(
    rows: list[tuple[int, int]], in_flight: float
) -> None:
    edges = bucket_edges(6_001)
    workload = Workload.of_history(edges, [r[0] for r in rows], [r[1] for r in rows], in_flight)
    assert workload.requests == pytest.approx(in_flight)
    total = sum(o for _, o in rows)
    at = 4
    in_bucket = sum(max(0, min(i + o, edges[at + 1]) - max(i, edges[at])) for i, o in rows)
    assert workload.sums[at, 0] == pytest.approx(in_flight * in_bucket / total)


@quick
@given(rows=lengths, cuts=st.lists(st.integers(1, 6_000), max_size=4))
def test_finer_edges_allow_any_cut_and_change_no_cost(rows: list[tuple[int, int]], cuts: list[int]) -> None:
    """The current stages can end at any length; finer edges change no sum."""
    edges = bucket_edges(6_001)
    finer = with_cuts(edges, [*cuts, 0, 10**9])
    assert set(finer) == set(edges) | set(cuts)
    traffic = Traffic.of_history(rows, 60.0)
    coarse, fine = (Costs(traffic.in_flight(e, 50.0), MODEL, 1e-6) for e in (edges, finer))
    whole = ([0, 512, 6_001], [2, 3])
    assert fine.layout(*whole).cost == pytest.approx(coarse.layout(*whole).cost, rel=1e-9)
    inner = sorted({cut for cut in cuts if cut < 6_001})
    found = fine.layout([0, *inner, 6_001], [1] * (len(inner) + 1))
    assert list(found.cuts) == [0, *inner, 6_001]
    with pytest.raises(ValueError, match="edges"):
        coarse.layout([0, 777, 6_001], [1, 1])


def test_stage_work_equals_the_fluid_limit() -> None:
    """One stage with equal requests, once with all KV in use and once with all slots in use."""
    traffic = Traffic.of_history([(1_000, 200)] * 60, 60.0)
    edges = bucket_edges(131_072)
    profile, mean = PROFILE, 1_100.0
    prefill_s = (profile.prefill.ms_per_token * 1_000 + profile.prefill.ms_per_token_squared * 1e6) / 1e3
    for capacity, slots in ((110_000.0, 1_024.0), (1e9, 50.0)):
        batch = min(capacity / mean, slots)
        step_s = (
            profile.decode.base_ms
            + profile.decode.ms_per_request * batch
            + profile.decode.ms_per_kv_token * batch * mean
        ) / 1e3
        work = stage_work(
            traffic, edges, replace(ENGINES, kv_capacity_tokens=capacity, slots=slots), Slowdown()
        )
        # One request per second: its prompt and its share of 200 steps.
        assert work[0, -1] == pytest.approx(prefill_s + 200 * step_s / batch, rel=0.01)
    with pytest.raises(ValueError, match="seconds"):
        stage_work(Traffic.of_history([(1, 1)], None), edges, ENGINES, Slowdown())


@pytest.mark.parametrize("counts", [[1, 2], [2, 1], [1, 9], [9, 1]])
def test_the_load_of_a_plan_is_the_load_of_its_busiest_instance(counts: list[int]) -> None:
    traffic = Traffic.of_history([(1_000, 200)] * 60 + [(9_000, 900)] * 20, 60.0)
    edges = bucket_edges(131_072)
    work = stage_work(traffic, edges, ENGINES, Slowdown())
    cut = int(bucket_of(edges, np.array([4_000]))[0])
    costs = Costs(traffic.in_flight(edges, 50.0), MODEL, 1e-6, work=work)
    plan = costs.layout([0, int(edges[cut]), int(edges[-1])], counts)
    expected = max(work[0, cut] / counts[0], work[cut, -1] / counts[1])
    assert costs.load(plan) == pytest.approx(expected) and expected > 0.0
    # Without stage work, the load is unknown.
    assert Costs(traffic.in_flight(edges, 50.0), MODEL, 1e-6).load(plan) == 0.0


def test_prompts_and_generated_tokens_are_work_in_their_own_stages() -> None:
    edges = bucket_edges(131_072)
    work = stage_work(Traffic.of_history([(1_000, 100), (5_000, 100)], 1.0), edges, ENGINES, Slowdown())
    at = {int(edge): number for number, edge in enumerate(edges)}
    # No request is shorter than 512 tokens or longer than 8,192; the short one ends in [1,024, 2,048).
    assert work[0, at[512]] == work[at[8_192], -1] == 0.0
    first = work[at[512], at[1_024]]
    assert first > PROFILE.prefill.ms(0, 1_000) / 1e3
    decoded = work[at[1_024], at[2_048]]
    assert 0.0 < decoded < first
    parts = first + decoded + work[at[4_096], at[8_192]]
    # Together, their batches are larger, so more requests share the base time of a step.
    assert 0.98 * parts < work[0, -1] <= parts


def test_the_penalty_for_unequal_lengths_applies_to_stages_that_mix_them() -> None:
    penalty = load_length_penalty("cascadeinfer-figure-2-step")
    assert penalty is not None
    edges = bucket_edges(131_072)
    traffic = Traffic.of_history([(100, 50)] * 90 + [(10_000, 50)] * 10, 60.0)
    slowdown = Slowdown.of(penalty, traffic.in_flight(edges, 100.0), 100)
    assert isinstance(slowdown.step, np.ndarray) and isinstance(slowdown.attention, np.ndarray)
    assert slowdown.step[0, -1] > 1.9 > 1.5 > slowdown.step[7, 8] >= 1.0
    assert (slowdown.attention == 1.0).all()
    plain = stage_work(traffic, edges, ENGINES, Slowdown())
    slowed = stage_work(traffic, edges, ENGINES, slowdown)
    assert (slowed >= plain - 1e-12).all() and slowed[0, -1] > plain[0, -1]


def test_finished_requests_represent_arrivals_of_similar_prompt_length() -> None:
    edges = bucket_edges(131_072)
    # Ten short and eight long requests arrived; two long ones finished, one of them from earlier. No very
    # long
    # one finished.
    arrived = [100] * 10 + [5_000] * 8 + [40_000, 60_000]
    finished = [(100, 50)] * 10 + [(5_000, 300), (6_000, 500)]
    traffic = Traffic.of_period(LengthStatistics.of(30.0, arrived, finished), edges)
    assert traffic is not None and traffic.requests == pytest.approx(20.0) and traffic.seconds == 30.0
    rows = dict(zip(traffic.inputs.tolist(), traffic.weights.tolist(), strict=True))
    assert rows[5_000] == rows[6_000] == 4.0 and rows[40_000] == rows[60_000] == 1.0
    outputs = dict(zip(traffic.inputs.tolist(), traffic.outputs.tolist(), strict=True))
    assert outputs[40_000] == pytest.approx((10 * 50 + 800) / 12)
    assert Traffic.of_period(LengthStatistics.of(30.0, [], finished), edges) is None
    assert Traffic.of_period(LengthStatistics.of(30.0, arrived, []), edges) is None


@quick
@given(
    st.lists(st.integers(1, 200_000), max_size=40),
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 900)), max_size=40),
)
def test_the_planned_traffic_has_as_many_requests_as_arrived(
    arrived: list[int], finished: list[tuple[int, int]]
) -> None:
    traffic = Traffic.of_period(LengthStatistics.of(60.0, arrived, finished), bucket_edges(131_072))
    if traffic is None:
        return
    assert float(traffic.weights @ traffic.outputs) > 0.0
    assert traffic.requests == pytest.approx(len(arrived))
    assert (traffic.weights >= 0.0).all() and (traffic.outputs >= 0.0).all()


def long_tail_costs(instances: int) -> Costs:
    """Return costs for ShareGPT-like lengths with a long tail, 60 requests per instance."""
    rng = np.random.default_rng(1)
    inputs = (np.minimum(rng.lognormal(5, 1.5, 5_000), 100_000) + 1).astype(int).tolist()
    outputs = (np.minimum(rng.lognormal(5, 1, 5_000), 30_000) + 1).astype(int).tolist()
    workload = Workload.of_history(bucket_edges(131_072), inputs, outputs, 60.0 * instances)
    return Costs(workload, MODEL, PROFILE.kv_bytes_per_token / 50e9)


def test_a_pipeline_is_cheaper_for_a_long_tail() -> None:
    costs = long_tail_costs(16)
    found = exact(costs, 16)
    assert len(found.counts) > 1
    assert found.cost < 0.95 * no_pipeline(costs, 16).cost
    assert found.cost < 0.95 * chain(costs, 16).cost


@pytest.mark.parametrize("plan", [exact, heuristic, chain, no_pipeline])
def test_a_plan_without_instances_is_an_error(plan: Callable[[Costs, int], Plan]) -> None:
    with pytest.raises(ValueError, match="instance"):
        plan(long_tail_costs(1), 0)


def test_invalid_buckets_and_too_few_names_are_errors() -> None:
    for wrong in ((0, 2.0), (10, 1.0)):
        with pytest.raises(ValueError, match="buckets"):
            bucket_edges(*wrong)
    with pytest.raises(ValueError, match="2 instances"):
        exact(long_tail_costs(3), 3).stages(["a", "b"])


def merged_by_cost(costs: Costs, instances: int) -> Plan:
    """Return the plan of phase 2 of the heuristic as published: make the cheapest merge while one reduces the
    total cost."""
    plan = chain(costs, instances)
    while len(plan.counts) > 1:
        cuts, counts = plan.cuts, plan.counts
        merges = [
            costs.layout(
                (*cuts[: i + 1], *cuts[i + 2 :]), (*counts[:i], counts[i] + counts[i + 1], *counts[i + 2 :])
            )
            for i in range(len(counts) - 1)
        ]
        best = min(merges, key=lambda merge: merge.cost)
        if best.cost >= plan.cost - 1e-12:
            break
        plan = best
    return plan


@settings(quick, max_examples=30)
@given(
    rows=lengths,
    model=models,
    instances=st.integers(1, 6),
    transfer=st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
)
def test_the_heuristic_merges_like_the_paper(
    rows: list[tuple[int, int]], model: QoeModel, instances: int, transfer: float
) -> None:
    edges = bucket_edges(6_001, growth=4.0)
    costs = Costs(Traffic.of_history(rows, 60.0).in_flight(edges, 50.0), model, transfer)
    expected = merged_by_cost(costs, instances).cost
    assert heuristic(costs, instances).cost == pytest.approx(expected, rel=1e-6, abs=1e-9)
