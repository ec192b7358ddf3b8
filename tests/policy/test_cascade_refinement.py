"""The QoE model and the refinement of boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import ClusterView, Stage
from tailrace.perf.qoe_model import QoeModel, features, mean_relative_error
from tailrace.policy.cascade.layout import earliest_stage, repaired, stage_of, tiles
from tailrace.policy.cascade.refinement import (
    Lengths,
    Refinement,
    Sharing,
    Splitter,
    by_length,
    divided,
    memory_split,
    optimal_split,
    quantity_split,
    whole,
)
from tailrace.profiles import load_profile
from tests.policy.fleets import MAX_LENGTH, fleets, quick

MODEL = QoeModel.of_profile(load_profile("llama-3.1-8b-h100"))
rows = st.lists(
    st.tuples(st.integers(1, 5_000), st.integers(0, 5_000)).map(lambda r: (r[0], r[0] + r[1])),
    min_size=1,
    max_size=40,
)
staged = fleets(staged=True)


def columns(held: Sequence[tuple[int, int]]) -> Lengths:
    return [prompt for prompt, _ in held], [context for _, context in held]


# ---- QoE


@quick
@given(
    d=st.tuples(*(st.floats(0.1, 1.0) for _ in range(5))),
    seed=st.integers(0, 1_000),
)
def test_the_fit_recovers_the_model(d: tuple[float, float, float, float, float], seed: int) -> None:
    truth = QoeModel((d[0] * 1e-2, d[1] * 1e-4, d[2] * 1e-7, d[3] * 1e-11, d[4] * 1e-7))
    batches = samples(seed)
    found = QoeModel.fit(batches, truth.requests(batches))
    other = samples(seed + 1)
    assert found.requests(other) == pytest.approx(truth.requests(other), rel=1e-5)


def test_the_fit_beats_the_mean_on_noisy_samples() -> None:
    """The comparison of figure 13 on synthetic samples: the remaining error is the 10% noise."""
    rng = np.random.default_rng(3)
    fitted, held_out = samples(1, 400), samples(2, 400)
    measured = MODEL.requests(fitted) * rng.normal(1.0, 0.1, 400)
    truth = MODEL.requests(held_out)
    found = QoeModel.fit(fitted, measured)
    mean = np.full(400, measured.mean())
    assert mean_relative_error(found.requests(held_out), truth) < 0.1
    assert mean_relative_error(found.requests(held_out), truth) < 0.5 * mean_relative_error(mean, truth)


def samples(seed: int, count: int = 60) -> np.ndarray:
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        n = int(rng.integers(1, 200))
        inputs = rng.integers(10, 4_000, n).astype(np.float64)
        batches.append(features(inputs, inputs + rng.integers(1, 4_000, n)))
    return np.array(batches)


def test_the_cost_of_a_batch_is_the_sum_over_its_requests() -> None:
    batch = features([10, 20], [15, 40])
    assert batch.tolist() == [1.0, 2.0, 30.0, 500.0, 55.0]
    assert MODEL.batch(batch) == 2 * MODEL.request(batch)
    assert MODEL.batch(features([], [])) == 0.0


def test_the_fit_rejects_wrong_shapes_and_no_samples() -> None:
    for batches, latencies in ((np.zeros((2, 4)), np.zeros(2)), (np.zeros((2, 5)), np.zeros(3))):
        with pytest.raises(ValueError, match="shape"):
            QoeModel.fit(batches, latencies)
    with pytest.raises(ValueError, match="samples"):
        QoeModel.fit(np.zeros((0, 5)), np.zeros(0))


# ---- splits


@quick
@given(rows, rows)
def test_rows_are_sorted_by_length_then_input(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    ordered = by_length([columns(one), columns(other)])
    assert ordered.tolist() == [list(row) for row in sorted([*one, *other], key=lambda row: (row[1], row[0]))]


@quick
@given(rows)
def test_the_optimal_split_has_the_lowest_cost(held: list[tuple[int, int]]) -> None:
    """Prefix sums are compared with Eq. (1) for every split."""
    ordered = by_length([columns(held)])
    exact = ordered.astype(np.float64)

    def cost(at: int) -> float:
        low, high = exact[:at], exact[at:]
        return MODEL.batch(features(low[:, 0], low[:, 1])) + MODEL.batch(features(high[:, 0], high[:, 1]))

    found = optimal_split(ordered, MODEL)
    assert cost(found) == pytest.approx(min(cost(at) for at in range(len(ordered))), rel=1e-9)


@quick
@given(rows)
def test_the_simple_splits_balance_count_and_memory(held: list[tuple[int, int]]) -> None:
    ordered = by_length([columns(held)])
    assert quantity_split(ordered, MODEL) == len(held) // 2
    found = memory_split(ordered, MODEL)
    lengths = ordered[:, 1]

    def difference(at: int) -> int:
        return abs(int(lengths[:at].sum()) - int(lengths[at:].sum()))

    assert difference(found) == min(difference(at) for at in range(len(lengths)))


@quick
@given(rows, st.integers(1, 8))
def test_a_share_has_an_equal_part_of_the_requests(held: list[tuple[int, int]], parts: int) -> None:
    part = divided(by_length([columns(held)]), parts)
    assert abs(len(part) - len(held) / parts) < 1
    assert [tuple(row) for row in part.tolist()] == sorted(
        (tuple(row) for row in part.tolist()), key=lambda row: row[1]
    )


# ---- boundaries


def held_by(view: ClusterView) -> Mapping[str, Lengths]:
    return {
        name: columns([(r.prompt_tokens, r.context_tokens) for r in i.requests])
        for name, i in view.instances.items()
    }


@pytest.mark.parametrize("share", [divided, whole])
@pytest.mark.parametrize("split", [optimal_split, quantity_split, memory_split])
@quick
@given(view=staged, smoothing=st.floats(0.0, 1.0))
def test_refined_stages_cover_all_lengths_with_the_same_instances(
    split: Splitter, share: Sharing, view: ClusterView, smoothing: float
) -> None:
    refined = Refinement(MODEL, split, smoothing, share=share).refine(view.stages, held_by(view))
    assert tiles(refined, MAX_LENGTH)
    assert [s.instance_ids for s in refined] == [s.instance_ids for s in view.stages]


def test_a_boundary_moves_toward_the_split_by_the_moving_average() -> None:
    stages = (Stage(0, 1_000, ("a",)), Stage(1_000, MAX_LENGTH, ("b",)))
    requests = {"a": columns([(10, 100)] * 20), "b": columns([(10, 3_000)] * 20)}
    at_once = Refinement(MODEL, smoothing=1.0).refine(stages, requests)
    assert at_once[0].hi == at_once[1].lo == 3_000
    tenth = Refinement(MODEL, smoothing=0.1).refine(stages, requests)
    assert tenth[0].hi == 1_200
    assert Refinement(MODEL, smoothing=0.0).refine(stages, requests) == stages


def test_a_boundary_converges_without_overshoot() -> None:
    stages: tuple[Stage, ...] = (Stage(0, 100, ("a",)), Stage(100, MAX_LENGTH, ("b",)))
    requests = {"a": columns([(10, 90)] * 20), "b": columns([(10, 5_000)] * 10 + [(10, 9_000)] * 10)}
    seen = []
    for _ in range(60):
        stages = Refinement(MODEL).refine(stages, requests)
        seen.append(stages[0].hi)
    assert seen == sorted(seen)
    assert seen[-1] == seen[-2]
    assert seen[-1] in range(4_900, 5_001)


def test_stages_are_weighed_per_instance_or_as_a_whole() -> None:
    """Four instances below and one above: each of the four has as many requests as the one above."""
    stages = (Stage(0, 1_000, ("a", "b", "c", "d")), Stage(1_000, MAX_LENGTH, ("e",)))
    requests = {name: columns([(10, 100 + n) for n in range(20)]) for name in "abcd"}
    requests["e"] = columns([(10, 3_000 + n) for n in range(20)])

    def boundary(share: Sharing) -> int:
        return Refinement(MODEL, quantity_split, 1.0, share=share).refine(stages, requests)[0].hi

    assert boundary(divided) == 3_000
    assert boundary(whole) < 200


@pytest.mark.parametrize(("count", "frozen"), [(4, True), (5, False)])
def test_boundaries_are_frozen_under_low_traffic(count: int, frozen: bool) -> None:
    stages = (Stage(0, 1_000, ("a",)), Stage(1_000, MAX_LENGTH, ("b",)))
    requests = {"a": columns([(10, 100)] * (count - 2)), "b": columns([(10, 3_000)] * 2)}
    assert (Refinement(MODEL).refine(stages, requests) == stages) is frozen


# ---- members


@quick
@given(view=staged, other=st.sets(st.sampled_from([f"w{n}" for n in range(9)]), min_size=1))
def test_repaired_stages_have_exactly_the_instances(view: ClusterView, other: set[str]) -> None:
    demand = {name: i.kv_used_tokens for name, i in view.instances.items()}
    stages = repaired(view.stages, other, demand)
    assert tiles(stages, MAX_LENGTH)
    assert {name for stage in stages for name in stage.instance_ids} == other
    assert repaired(stages, other, demand) == stages
    for name in other & view.instances.keys():
        assert stage_of(stages, name) is not None
    assert repaired(view.stages, (), demand) == ()


@quick
@given(view=staged, length=st.integers(0, 2 * MAX_LENGTH))
def test_each_length_is_covered_by_one_stage(view: ClusterView, length: int) -> None:
    stage = view.stages[earliest_stage(view.stages, length)]
    assert stage.lo <= length
    assert length < stage.hi or stage is view.stages[-1]
