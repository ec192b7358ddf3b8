"""The choice among instances for an arrival, evaluated one by one and as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import ClusterView, InstanceView, Phase, RequestView
from tailrace.intra.earliest_due import due_after_s, nominal_s
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.measured import Measured
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.offers import FEW, OfferPlanner
from tailrace.policy.tailrace.queue import Queue, QueueColumns
from tailrace.profiles import load_profile
from tests.policy.fleets import instance, request
from tests.policy.tailrace_arrival import cheapest

NOMINAL = StepModel.of_profile(None)
COSTS = Costs(NOMINAL)


def measured(name: str, steps: StepModel, backlog_tokens: int = 0) -> InstanceView:
    profile = load_profile("llama-3.2-3b-l40")
    known = Measured(profile, TtftPredictor.of_profile(profile), steps, QoeModel.of_profile(profile))
    return replace(
        instance(name),
        measured=known,
        waiting=int(backlog_tokens > 0),
        prefill_backlog_tokens=backlog_tokens,
    )


def planned(few: int, instances: Sequence[InstanceView], costs: Costs = COSTS) -> OfferPlanner:
    planner = OfferPlanner(costs, few)
    planner.update(costs, ClusterView({i.instance_id: i for i in instances}))
    return planner


@pytest.mark.parametrize("few", [0, FEW])
@pytest.mark.parametrize("penalty", [None, "cascadeinfer-figure-2-step"])
def test_a_tie_goes_to_the_first_instance(few: int, penalty: str | None) -> None:
    costs = replace(COSTS, penalty=None if penalty is None else load_length_penalty(penalty))
    instances = [instance(name) for name in "abc"]
    planner = planned(few, instances, costs)
    assert planner.cheapest(None, 500, 0.0).instance_id == "a"
    assert planner.cheapest(instances[::-1], 500, 0.0).instance_id == "c"
    assert planner.cheapest(instances[1:], 500, 0.0).instance_id == "b"


@pytest.mark.parametrize("few", [0, FEW])
def test_a_prompt_of_one_token_goes_to_the_faster_instance(few: int) -> None:
    """A step takes longer there, but without cached KV the whole prompt has to be computed."""
    slow = replace(NOMINAL, per_token_s=2e-3, decode_base_s=NOMINAL.decode_base_s - 1e-4)
    quick = replace(NOMINAL, per_token_s=1e-3)
    planner = planned(few, [measured("slow", slow), measured("quick", quick)])
    assert planner.cheapest(None, 1, 0.0).instance_id == "quick"


@pytest.mark.parametrize("few", [0, FEW])
def test_patience_is_derived_from_the_first_instance(few: int) -> None:
    """Near the backlog at which waiting costs as much as sharing, the order of the instances decides."""
    slow = StepModel.of_profile(load_profile("llama-3.2-3b-l40"), 512)
    reasons = instance("slow", (request("r", "slow", phase=Phase.REASONING),))
    taken = replace(reasons, measured=measured("slow", slow).measured)
    chosen: dict[bool, list[str]] = {}
    for slow_first in (False, True):
        chosen[slow_first] = []
        for backlog in range(2_000, 80_000, 2_000):
            pair = [taken, measured("quick", NOMINAL, backlog)]
            instances = pair if slow_first else pair[::-1]
            found = planned(few, instances).cheapest(None, 4_000, 0.0)
            assert found is cheapest(COSTS, instances, 4_000, 0.0)
            chosen[slow_first].append(found.instance_id)
    assert "slow" in chosen[False] and "quick" in chosen[False]
    assert chosen[False] != chosen[True]


PROMPTS = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 9_000)), max_size=9)
QUEUES = st.lists(st.none() | st.tuples(PROMPTS, st.integers(0, 9_000)), min_size=1, max_size=5)


@given(
    queues=QUEUES,
    tokens=st.integers(1, 9_000),
    now=st.floats(0.0, 9.0),
    depth=st.sampled_from([1, 4, 8]),
    doublings=st.integers(0, 2),
)
def test_columns_of_queues_have_the_same_prompts_before_an_arrival(
    queues: list[tuple[list[tuple[float, int]], int] | None],
    tokens: int,
    now: float,
    depth: int,
    doublings: int,
) -> None:
    columns = QueueColumns(len(queues), depth)
    made = [None if each is None or not each[0] else Queue.of(*each, NOMINAL) for each in queues]
    fit = []
    for position, queue in enumerate(made):
        # Whatever stood there before is replaced.
        columns.set(position, Queue.of([(1.0, 700), (1.0, 70)], 300, NOMINAL))
        fit.append(columns.set(position, queue))
    for _ in range(doublings):
        assert columns.deepen()
        fit = [fits or columns.set(n, made[n]) for n, fits in enumerate(fit)]
    assert columns.depth == depth << doublings
    own_s = nominal_s(tokens, tokens * tokens)
    rows = zip(*(column.tolist() for column in columns.before(own_s, now)), strict=True)
    for queue, fits, row in zip(made, fit, rows, strict=True):
        assert fits == (queue is None or len(queue.due) <= columns.depth)
        if queue is None or not fits:
            assert row == (0.0, 0.0, 0.0)
        else:
            assert row == pytest.approx(queue.before(now + due_after_s(own_s, queue.queued_s)))


def test_columns_of_queues_are_bounded() -> None:
    columns = QueueColumns(2, QueueColumns.DEEPEST // 2)
    assert columns.deepen()
    assert not columns.deepen()
    assert columns.depth == QueueColumns.DEEPEST


def waiting(where: str, number: int, tokens: int) -> RequestView:
    """Return a prompt that waits on an instance, the `number`-th to arrive."""
    prompt = request(f"{where}-{number}", where, tokens, phase=Phase.PREFILL)
    return replace(prompt, arrival_s=0.01 * number)


@pytest.mark.parametrize("prompts", [4, 20, 300])
def test_long_queues_are_planned_alike_by_column_and_one_by_one(prompts: int) -> None:
    """More of them than are kept one by one, shorter and longer than the deepest columns."""
    names = [f"i{n:02}" for n in range(FEW + 10)]
    instances = [
        instance(name, tuple(waiting(name, k, 100 + 7 * n + k) for k in range(prompts + n % 3)))
        for n, name in enumerate(names)
    ]
    few, many = planned(len(instances), instances), planned(2, instances)
    for tokens in (1, 50, 900, 9_000):
        for now in (0.0, 1.0, 30.0):
            assert few.cheapest(None, tokens, now) is many.cheapest(None, tokens, now)
