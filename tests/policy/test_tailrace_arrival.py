"""The cost of an arrival in seconds equals the reference formula on every instance, not only the cheapest."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import ClusterView, InstanceView
from tailrace.intra.earliest_due import due_s
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.steps import StepModel, StepTimes
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.arrival import (
    OF_MANY,
    OF_ONE,
    Offer,
    QueueAhead,
    Reported,
    cost_without_shortage_s,
    offer,
    prefill_after_s,
    prefill_s,
    shortage_s,
)
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.policy.tailrace.queue import Queue
from tests.policy.fleets import quick
from tests.policy.tailrace_arrival import arrival_s
from tests.policy.test_tailrace import reporting

PENALTY = load_length_penalty("cascadeinfer-figure-2-step")
NOW = 4.0


def reported(instance: InstanceView) -> Reported[float]:
    """Return what a view contains of the instance."""
    backlog = instance.prefill_backlog_tokens
    waiting = table_of(instance.requests).prompts() if backlog else ()
    counted = table_of(instance.requests).phase_load()
    return Reported(
        running=instance.running,
        waiting=instance.waiting,
        used=instance.kv_used_tokens,
        backlog=backlog,
        host=instance.host_kv_tokens,
        capacity=instance.kv_capacity_tokens,
        context=instance.context_tokens,
        reasoning=counted.reasoning,
        future=max(instance.future_load, default=-inf),
        prompts=len(waiting),
        prompt_tokens=sum(length for _, length in waiting),
    )


def before(
    instance: InstanceView, offered: Offer[float], steps: StepModel, prompt: int
) -> tuple[float, float, float]:
    """Return the tokens and seconds served before such a prompt, and the number of prompts after it."""
    waiting = table_of(instance.requests).prompts() if instance.prefill_backlog_tokens else ()
    if not waiting:
        return offered.unlisted, offered.unlisted_s, 0.0
    queue = Queue.of(waiting, instance.prefill_backlog_tokens, steps)
    known, known_s, after = queue.before(due_s(NOW, prompt, queue.queued_s))
    return offered.unlisted + known, offered.unlisted_s + known_s, after


@pytest.mark.parametrize("penalty", [None, PENALTY])
@quick
@given(view=reporting(), prompt=st.integers(1, 50_000), share=st.sampled_from((0.0, 0.3, 0.9)))
def test_the_cost_of_an_arrival_equals_the_reference(
    penalty: object, view: ClusterView, prompt: int, share: float
) -> None:
    costs: Costs = Tailrace(penalty=PENALTY if penalty is not None else None).costs
    cached, patience_s = int(share * prompt), 3.0
    for instance in view.instances.values():
        steps = costs.steps_of(instance)
        offered = offer(costs, reported(instance), steps, OF_ONE)
        served = QueueAhead(*before(instance, offered, steps, prompt))
        total_s = cost_without_shortage_s(offered, prompt, float(cached), served, patience_s, OF_ONE)
        total_s += shortage_s(costs, offered, prompt + costs.expected_tokens, OF_ONE)
        if costs.penalty is not None:
            slowdown_s = costs.slowdown_s(instance, prompt, Longest.of(instance).tokens)
            total_s += offered.decode_weight * costs.expected_tokens * slowdown_s
        assert total_s == pytest.approx(arrival_s(costs, instance, prompt, NOW, patience_s, cached))


@quick
@given(view=reporting(), prompt=st.integers(1, 50_000))
def test_columns_equal_single_evaluations(view: ClusterView, prompt: int) -> None:
    members = list(view.instances.values())
    for penalty, cached in itertools.product((None, PENALTY), (0.0, prompt * 0.3)):
        costs = Tailrace(penalty=penalty).costs
        steps = StepModel.of_profile(None)
        alone = [offer(costs, reported(i), steps, OF_ONE) for i in members]
        columns = Reported(*np.array([reported(i) for i in members], dtype=np.float64).T)
        fields = [getattr(steps, name) for name in StepTimes.__dataclass_fields__]
        times = StepTimes(*(np.full(len(members), value) for value in fields))
        together = offer(costs, columns, times, OF_MANY)
        assert np.array(together) == pytest.approx(np.array(alone, dtype=np.float64).T)
        served = QueueAhead(together.unlisted, together.unlisted_s, np.zeros(len(members)))
        seconds = cost_without_shortage_s(together, prompt, cached, served, 3.0, OF_MANY)
        assert list(seconds) == pytest.approx(
            [
                cost_without_shortage_s(
                    o, prompt, cached, QueueAhead(o.unlisted, o.unlisted_s, 0.0), 3.0, OF_ONE
                )
                for o in alone
            ]
        )


@given(prompt=st.integers(1, 50_000), cached=st.integers(0, 50_000))
@quick
def test_cached_tokens_cost_no_prefill(prompt: int, cached: int) -> None:
    costs, steps = Tailrace().costs, StepModel.of_profile(None)
    idle = offer(costs, reported(InstanceView("a")), steps, OF_ONE)
    assert prefill_s(idle, prompt) == pytest.approx(steps.compute_s(prompt))
    held = min(prompt, cached)
    left_s = steps.compute_s(prompt) - steps.compute_s(held)
    assert prefill_after_s(idle, prompt, held) == pytest.approx(left_s)


@quick
@given(view=reporting(), slo_s=st.sampled_from((1e-4, 0.01, 0.15)))
def test_the_weight_of_decoding_requests_is_at_most_one(view: ClusterView, slo_s: float) -> None:
    costs = replace(Tailrace().costs, tpot_slo_s=slo_s)
    for instance in view.instances.values():
        offered = offer(costs, reported(instance), costs.steps_of(instance), OF_ONE)
        assert 0.0 <= offered.decode_weight <= 1.0
        # A delay beyond the TPOT SLO counts as much as a delay of the first token.
        assert offered.step_s < slo_s or offered.decode_weight == pytest.approx(1.0)
