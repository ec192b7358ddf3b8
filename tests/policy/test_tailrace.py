"""The tailrace policy: its costs against a plain formula, and the purpose of each part of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Place, Refuse
from tailrace.cluster import (
    Arrival,
    CachedTokens,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    RequestView,
)
from tailrace.handover import TRANSFERS
from tailrace.intra.base import FEWEST_DECODING
from tailrace.intra.earliest_due import PREFILLS, EarliestDue, due_s, nominal_s
from tailrace.intra.registry import make_intra
from tailrace.perf.horizon import HORIZON
from tailrace.perf.measured import Measured
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.candidates import Ledger, needed_tokens
from tailrace.policy.registry import load
from tailrace.policy.requests import movable
from tailrace.policy.tailrace.costs import Costs, Offers
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.policy.tailrace.queue import DEEPEST, QueueColumns
from tailrace.policy.tailrace.rebalance import BIDDERS, SOURCES, rebalance
from tailrace.profiles import load_profile
from tailrace.slo import DEFAULT_TPOT_S
from tests.policy.clusters import arrivals as more_arrivals
from tests.policy.clusters import clusters
from tests.policy.fleets import arrivals, cluster, fleets, instance, quick, request

NOW = 4.0
NOMINAL = StepModel.of_profile(None)
COSTS = Costs(NOMINAL, 0.15)
POLICIES = [
    Tailrace(),
    Tailrace(load_profile("r1-distill-qwen-32b-h100")),
    # Migrations are free: any saving suffices.
    Tailrace(margin=0.0),
]
views = fleets() | clusters()


def offers_of(view: ClusterView, costs: Costs = COSTS) -> Offers:
    offers = Offers(costs)
    offers.update(view, 0.0)
    return offers


# ---- soundness


def check(view: ClusterView, actions: Sequence[Action]) -> None:
    """Assert that each migration is possible in the view, and all of them together."""
    taken: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    moved: set[str] = set()
    for action in actions:
        assert isinstance(action, Migrate)
        source, target = view.instances[action.source_id], view.instances[action.target_id]
        held = next(r for r in source.requests if r.request_id == action.request_id)
        # One migration of a request at a time.
        assert not held.migrating and held.request_id not in moved
        moved.add(held.request_id)
        # No opposite migrations between two instances, whether new or still open.
        assert source is not target
        assert (action.target_id, action.source_id) not in pairs
        assert not (source.migrations_in and target.migrations_out)
        pairs.add((action.source_id, action.target_id))
        # Not more than fits.
        assert target.state is InstanceState.ACTIVE
        taken[action.target_id] = taken.get(action.target_id, 0) + needed_tokens(held, target)
        assert taken[action.target_id] <= target.kv_free_tokens
        assert target.max_model_len <= 0 or held.context_tokens < target.max_model_len


@quick
@given(view=views, arrival=arrivals | more_arrivals)
def test_arrivals_are_placed_on_a_live_instance(view: ClusterView, arrival: Arrival) -> None:
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    for policy in POLICIES:
        placement = policy.place(view, arrival, 0.0)
        assert policy.place(view, arrival, 0.0) == placement
        if usable:
            assert isinstance(placement, Place) and placement.instance_id in usable
            check(view, placement.also)
        else:
            assert isinstance(placement, Refuse)


@quick
@given(view=views, now=st.sampled_from([0.0, 1.0, 61.5]))
def test_ticks_are_sound(view: ClusterView, now: float) -> None:
    for policy in POLICIES:
        actions = policy.on_tick(view, now)
        assert list(policy.on_tick(view, now)) == list(actions)
        check(view, actions)


def test_the_policy_is_registered_by_name() -> None:
    policy = load("tailrace")
    assert type(policy) is Tailrace and policy.summary
    assert isinstance(make_intra(Tailrace.batch_order), EarliestDue)


def test_instances_without_reports_get_requests() -> None:
    """They get requests, and nothing is migrated."""
    view = ClusterView(MappingProxyType({name: InstanceView(name) for name in ("w0", "w1")}))
    policy = Tailrace()
    placement = policy.place(view, Arrival("new", 100, 100, 0), 0.0)
    assert placement == Place("w0")
    assert list(policy.on_tick(view, 0.0)) == []
    empty = ClusterView(MappingProxyType({}))
    assert isinstance(policy.place(empty, Arrival("new", 100, 100, 0), 0.0), Refuse)
    assert list(policy.on_tick(empty, 0.0)) == []


@st.composite
def reporting(draw: st.DrawFn) -> ClusterView:
    """Draw instances of two kinds, one of them measured, with prompts that arrived at different times.

    Some list their prompts; for some, the backlog is partly unknown or partly computed.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    slow = load_profile("llama-3.2-3b-l40")
    steps = StepModel.of_profile(slow, 512)
    measured = Measured(slow, TtftPredictor.of_profile(slow), steps, QoeModel.of_profile(slow))
    members = []
    for here in draw(fleets() | clusters(least=1)).instances.values():
        held = tuple(dataclasses.replace(r, arrival_s=rng.uniform(0.0, 8.0)) for r in here.requests)
        there = dataclasses.replace(here, requests=held)
        if rng.random() < 0.4:
            backlog = int(there.prefill_backlog_tokens * rng.choice((0.3, 2.0)))
            there = dataclasses.replace(there, prefill_backlog_tokens=backlog)
        if rng.random() < 0.3:
            there = dataclasses.replace(there, measured=measured)
        members.append(there)
    return cluster(*members)


# ---- the cost of an arrival


class Expected(NamedTuple):
    """The cost of an arrival on one instance, without the answers that its prefill delays."""

    cost_s: float
    own_s: float
    # Requests that the prefill delays if it runs there, weighted by the urgency of answers.
    answers: float


def expected_arrival_s(
    costs: Costs, view: ClusterView, prompt: int, cached: Mapping[str, int]
) -> dict[str, float]:
    """Return the cost of an arrival on each instance term by term, as in docs/policy-tailrace.md."""
    instances = view.instances.values()
    shortest_s = min(costs.steps_of(each).decode_base_s for each in instances)
    terms = [expected_terms(costs, each, prompt, cached[each.instance_id], shortest_s) for each in instances]
    # Where arrivals may go.
    open_ = [each.state is InstanceState.ACTIVE for each in instances]
    room = sum(each.kv_capacity_tokens for each, takes in zip(instances, open_, strict=True) if takes)
    answers = sum(term.answers for term, takes in zip(terms, open_, strict=True) if takes)
    return {
        each.instance_id: term.cost_s + term.own_s * answers * each.kv_capacity_tokens / max(1, room)
        for each, term in zip(instances, terms, strict=True)
    }


def expected_terms(
    costs: Costs, instance: InstanceView, prompt: int, cached: int, shortest_s: float
) -> Expected:
    steps, backlog = costs.steps_of(instance), instance.prefill_backlog_tokens
    requests, held = instance.running + instance.waiting, instance.kv_used_tokens + backlog
    step_s = steps.decode_s(instance.running, instance.kv_used_tokens)
    waiting = [r for r in instance.requests if r.phase is Phase.PREFILL] if backlog else []
    queued = sorted((r.arrival_s, r.prompt_tokens) for r in waiting)
    prompts = sorted(
        (due_s(at_s, length, _prefill_s(queued[:n])), length) for n, (at_s, length) in enumerate(queued)
    )
    # Served before it: the unlisted part of the backlog, then prompts due earlier, less what is computed.
    known = sum(length for _, length in prompts)
    unknown = max(0, backlog - known)
    done = max(0, known - backlog)
    found_s = 0.0
    for _, length in prompts:
        computed = min(done, length)
        done -= computed
        found_s += nominal_s(length - computed, length**2 - computed**2)
    first = [length for due, length in prompts if due <= due_s(NOW, prompt, found_s)]
    left = max(0, sum(first) - max(0, known - backlog))
    before_s = sum(map(steps.compute_s, first)) * left / sum(first) if left else 0.0
    before_s += steps.backlog_s(unknown, max(1, instance.waiting - len(prompts)))
    own_s = steps.compute_s(prompt) - steps.compute_s(cached)
    wait_s = own_s + before_s + ((left + unknown + prompt - cached) / steps.chunk_tokens + 1.0) * step_s
    patience_s = costs.patience_s + PREFILLS * costs.nominal.compute_s(prompt)
    wait_s *= 1.0 + wait_s / patience_s
    # The requests that its prefill delays.
    behind = len(prompts) - len(first)
    reasoning = [r for r in instance.requests if r.phase is Phase.REASONING and not r.demoted]
    reasons = min(1.0, len(reasoning) / max(1, requests - len(prompts)))
    # The share that they have used of the time that they may take.
    used_s = sum(NOW - r.arrival_s for r in reasoning)
    allowed_s = sum(costs.ttft_slo_s + r.output_tokens * costs.tpot_slo_s for r in reasoning)
    used = min(1.0, max(0.0, used_s) / allowed_s) if reasoning else 0.0
    # What its kind adds to an idle step, if that is within the SLO.
    kind_s = 0.0
    if steps.decode_base_s < costs.tpot_slo_s:
        kind_s = steps.decode_base_s - shortest_s
    share = min(1.0, (step_s - kind_s) / (costs.tpot_slo_s - kind_s))
    spared_s = costs.expected_tokens * (1.0 - reasons) * share * share * kind_s
    answering, late = (1.0 - reasons) * share * share, reasons * used * used
    decoding = max(0, requests - behind)
    joining_s = costs.expected_tokens * slowdown_s(steps, requests, held, prompt)
    cost_s = (
        (answering + late) * joining_s
        - spared_s
        + wait_s
        + own_s * (behind + late * decoding)
        + expected_shortage_s(costs, instance, prompt + costs.expected_tokens)
    )
    barred = instance.state is not InstanceState.ACTIVE
    return Expected(inf if barred else cost_s, own_s, answering * decoding)


def _prefill_s(prompts: Sequence[tuple[float, int]]) -> float:
    return sum(nominal_s(length, length * length) for _, length in prompts)


def slowdown_s(steps: StepModel, requests: float, held: float, tokens: float) -> float:
    """Return the increase of B * step(B, K) by a request with so many tokens."""
    after_s = (requests + 1) * steps.decode_s(requests + 1, held + tokens)
    return after_s - requests * steps.decode_s(requests, held)


def expected_shortage_s(costs: Costs, instance: InstanceView, more_tokens: float) -> float:
    """Return the wait until so many more tokens are free."""
    held = instance.kv_used_tokens + instance.prefill_backlog_tokens
    step_s = costs.steps_of(instance).decode_s(instance.running, instance.kv_used_tokens)
    free_token_s = costs.expected_tokens * step_s / max(1, instance.kv_used_tokens)
    return max(0.0, held + more_tokens - instance.kv_capacity_tokens) * free_token_s


@quick
@given(
    views=st.lists(reporting(), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 50_000), min_size=4, max_size=8),
    share=st.sampled_from((0.0, 0.3, 0.9)),
)
def test_the_cost_of_an_arrival_follows_the_formula(
    views: list[ClusterView], lengths: list[int], share: float
) -> None:
    """Between views, only some instances send new reports."""
    policy = Tailrace()
    offers, placed = Offers(COSTS), []
    for n, prompt in enumerate(lengths):
        view = views[n % len(views)]
        known = views[(n - 1) % len(views)].instances
        # Instances without a new report are the same objects as before.
        kept = {name: known.get(name, new) if n % 2 else new for name, new in view.instances.items()}
        view = cluster(*kept.values())
        offers.update(view, 0.0)
        tokens = {name: int(share * prompt * (at % 2)) for at, name in enumerate(view.instances)}
        cached = {name: CachedTokens(held, held) for name, held in tokens.items() if held}
        expected = expected_arrival_s(COSTS, view, prompt, tokens)
        arriving = Arrival("new", prompt, 100, n, cached=cached)
        costs_s = offers.arrival_s(arriving, offers.usable_tokens(cached), NOW)
        assert dict(zip(offers.at, costs_s.tolist(), strict=True)) == pytest.approx(expected)
        placed.append(policy.place(view, arriving, NOW))
        # Neither what was kept of earlier views nor where the others are affects the placement.
        assert placed[-1] == Tailrace().place(view, arriving, NOW)


@quick
@given(view=views, prompt=st.integers(1, 50_000))
def test_an_excluded_instance_gets_no_arrival(view: ClusterView, prompt: int) -> None:
    offers, names = offers_of(view), list(view.instances)
    excluded = frozenset([*names[::2], "unknown"])
    costs_s = offers.arrival_s(Arrival("new", prompt, 100, 0, excluded=excluded), np.zeros(len(names)), NOW)
    assert all(costs_s[offers.at[name]] == inf for name in names[::2])


@quick
@given(view=reporting(), slo_s=st.sampled_from((1e-4, 0.01, 0.15)))
def test_the_weight_of_decoding_requests_is_at_most_one(view: ClusterView, slo_s: float) -> None:
    costs = Costs(NOMINAL, slo_s)
    offers = offers_of(view, costs)
    answering = offers.offer.answering
    now_and_later = (answering + offers.reasoning_weights(now) for now in (NOW, 1e9))
    for here, weight, much_later in zip(view.instances.values(), *now_and_later, strict=True):
        assert 0.0 <= weight <= much_later <= 1.0 + 1e-9
        # Where steps take longer than the TPOT SLO and nobody has time left, a delay counts in full.
        step_s = costs.steps_of(here).decode_s(here.running, here.kv_used_tokens)
        assert step_s < slo_s or much_later == pytest.approx(1.0)


def test_reasoning_counts_by_how_much_of_its_time_is_used() -> None:
    """Of 2 s and 0.15 s for each of 100 tokens: 17 s."""
    reasoning = tuple(request(f"r{n}", "w0", 500, 100, Phase.REASONING) for n in range(4))
    offers = offers_of(cluster(instance("w0", reasoning)), COSTS)
    weights = [offers.reasoning_weights(now).item() for now in (0.0, 8.5, 17.0, 50.0)]
    assert weights == [0.0, 0.25, 1.0, 1.0]


def test_a_long_prompt_need_not_wait_where_reasoning_has_time() -> None:
    """Its prefill delays 30 requests; they have time for that until they are late."""
    reasoning = instance("w0", tuple(request(f"r{n}", "w0", 500, 2_000, Phase.REASONING) for n in range(30)))
    queued = instance("w1", (request("q0", "w1", 60_000, 0, Phase.PREFILL),))
    view, new = cluster(reasoning, queued), Arrival("new", 60_000, 100, 0)
    assert Tailrace().place(view, new, 30.0) == Place("w0")
    assert Tailrace().place(view, new, 150.0) == Place("w1")


def answers(name: str, count: int, context: int, state: InstanceState = InstanceState.ACTIVE) -> InstanceView:
    """Return an instance with so many answers of so many tokens each."""
    held = (request(f"{name}-{n}", name, context - 100, 100) for n in range(count))
    return instance(name, tuple(held), state=state)


def test_a_long_prompt_delays_answers_by_the_share_of_kv() -> None:
    """Not those that run where it goes: with as much KV in use, few answers are those with long contexts."""
    costs = Costs(NOMINAL, tpot_slo_s=0.03)
    few, many = answers("few", 10, 20_000), answers("many", 100, 2_000)
    offers = offers_of(cluster(few, many), costs)
    short_s, long_s = (offers.arrival_s(Arrival("new", tokens, 100, 0), 0.0, NOW) for tokens in (2, 20_000))
    # What a longer prompt costs more differs by its decoding with the others, and little by its own wait.
    decoding_s = costs.expected_tokens * offers.offer.answering * offers.offer.joining_token_s * (20_000 - 2)
    assert np.diff(long_s - short_s - decoding_s) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("state", [InstanceState.SUSPECT, InstanceState.DRAINING])
@pytest.mark.parametrize("count", [0, 200])
def test_instances_that_take_no_arrivals_change_no_cost(state: InstanceState, count: int) -> None:
    active = answers("a", 60, 3_000), answers("b", 20, 3_000)
    others = (answers(f"c{n}", count, 1_000, state) for n in range(6))
    new = Arrival("new", 30_000, 100, 0, cached={"a": CachedTokens(20_000, 20_000)})
    found = []
    for view in (cluster(*active), cluster(*active, *others)):
        offers = offers_of(view)
        found.append(offers.arrival_s(new, offers.usable_tokens(new.cached), NOW)[:2].tolist())
    assert found[0] == found[1]


def test_a_tie_goes_to_the_first_instance() -> None:
    view = cluster(*(instance(name) for name in "abc"))
    new = Arrival("new", 500, 100, 0)
    assert Tailrace().place(view, new, 0.0) == Place("a")
    assert Tailrace().place(view, dataclasses.replace(new, excluded=frozenset("a")), 0.0) == Place("b")


def test_an_arrival_goes_to_the_shorter_queue() -> None:
    queued = tuple(request(f"q{n}", "w0", 4_000, 0, Phase.PREFILL) for n in range(5))
    placement = Tailrace().place(
        cluster(instance("w0", queued), instance("w1", queued[:1])), Arrival("new", 500, 100, 0), 0.0
    )
    assert placement == Place("w1")


def test_a_waiting_long_prompt_does_not_deter_a_short_one() -> None:
    """The short prompt is served first: only work served before it counts."""
    long = (request("q0", "w0", 60_000, 0, Phase.PREFILL),)
    short = tuple(request(f"q{n}", "w1", 400, 0, Phase.PREFILL) for n in range(12))
    view = cluster(instance("w0", long), instance("w1", short))
    assert Tailrace().place(view, Arrival("new", 500, 100, 0), 0.0) == Place("w0")
    # A prompt as long as the first has to wait for it.
    assert Tailrace().place(view, Arrival("new", 60_000, 100, 0), 0.0) == Place("w1")


def test_unlisted_prompts_count_as_served_first() -> None:
    unlisted = dataclasses.replace(instance("w0"), prefill_backlog_tokens=9_000, waiting=2)
    # A short prompt does not wait for a listed long one.
    long = instance("w1", (request("q0", "w1", 60_000, 0, Phase.PREFILL),))
    assert Tailrace().place(cluster(unlisted, long), Arrival("new", 500, 100, 0), 0.0) == Place("w1")


def test_a_short_prompt_goes_to_a_queue_it_can_overtake() -> None:
    # One long prompt waits on w0, two medium ones on w1.
    waiting = instance("w0", (request("q0", "w0", 30_000, 0, Phase.PREFILL),))
    others = tuple(request(f"q{n}", "w1", 6_000, 0, Phase.PREFILL) for n in (1, 2))
    view, new = cluster(waiting, instance("w1", others)), Arrival("new", 500, 100, 0)
    assert Tailrace().place(view, new, 0.0) == Place("w0")


def test_delaying_answering_costs_less_than_delaying_reasoning_without_time() -> None:
    reasoning = instance("w0", tuple(request(f"r{n}", "w0", phase=Phase.REASONING) for n in range(4)))
    answering = instance("w1", tuple(request(f"r{n}", "w1") for n in range(4)))
    assert Tailrace().place(cluster(reasoning, answering), Arrival("new", 500, 100, 0), 100.0) == Place("w1")


# ---- waiting prompts


@quick
@given(
    lengths=st.lists(st.integers(1, 50_000), min_size=1, max_size=20),
    new=st.integers(1, 50_000),
    other=st.lists(st.integers(1, 50_000), max_size=20),
)
def test_a_queue_computes_the_work_before_a_due_time(lengths: list[int], new: int, other: list[int]) -> None:
    queues = QueueColumns(2)
    # Whatever stood there before is replaced.
    queues.set(1, [(0.0, length) for length in other], sum(other), NOMINAL)
    queues.set(1, [(0.0, length) for length in lengths], sum(lengths), NOMINAL)
    ahead = queues.ahead(nominal_s(new, new * new), 0.0)
    # All prompts arrived at the same time and are due in order of length.
    found_s, dues = 0.0, []
    for length in sorted(lengths):
        dues.append((due_s(0.0, length, found_s), length))
        found_s += nominal_s(length, length * length)
    first = [length for due, length in dues if due <= due_s(0.0, new, found_s)]
    assert (ahead.tokens[1], ahead.behind[1]) == (sum(first), len(lengths) - len(first))
    assert ahead.seconds[1] == pytest.approx(sum(map(NOMINAL.compute_s, first)))
    assert [column[0] for column in ahead] == [0.0, 0.0, 0.0]
    queues.set(1, [], 0, NOMINAL)
    assert queues.prompts == 0 and not any(column.any() for column in queues.ahead(1.0, 0.0))


def test_of_a_long_queue_the_last_prompts_are_served_after_any_arrival() -> None:
    queues, count = QueueColumns(1), DEEPEST + 50
    queues.set(0, [(0.0, 10 + n) for n in range(count)], 10 * count + count * (count - 1) // 2, NOMINAL)
    ahead = queues.ahead(1e6, 0.0)
    assert ahead.behind[0] == 50
    assert ahead.tokens[0] == sum(10 + n for n in range(DEEPEST))


def test_a_late_prompt_is_waited_for_once_its_turn_has_come() -> None:
    queues, own_s = QueueColumns(1), nominal_s(1_000, 1_000_000)
    queues.set(0, [(100.0, 1_000), (101.0, 500)], 1_500, NOMINAL, 40.0, (101.98, 2.0))
    assert queues.ahead(own_s, 103.0).tokens[0] == 500
    assert queues.ahead(own_s, 140.0).tokens[0] == 1_500


def test_only_where_tokens_come_too_far_apart_an_arrival_passes_late_prompts() -> None:
    late = tuple(request(f"q{n}", "w0", 4_000, 0, Phase.PREFILL) for n in range(4))

    def cost_s(limit: float, tpot_slo_s: float = 0.14, running: int = FEWEST_DECODING) -> float:
        offers = Offers(Tailrace(tpot_slo_s=tpot_slo_s, tpot_limit=limit).costs)
        decoding = tuple(request(f"r{n}", "w0", 10, 10, Phase.ANSWERING) for n in range(running))
        offers.update(cluster(instance("w0", (*late, *decoding), token_interval_s=0.11)), 20.0)
        return float(offers.arrival_s(Arrival("new", 1_000, 0), 0.0, 20.0)[0])

    assert cost_s(1.2) < cost_s(1.3) == cost_s(0.0)
    assert cost_s(1.0, DEFAULT_TPOT_S) == cost_s(0.0, DEFAULT_TPOT_S)
    fewer = FEWEST_DECODING - 1
    assert cost_s(1.2, running=fewer) == cost_s(0.0, running=fewer)


def test_the_computed_part_of_a_prompt_is_not_waited_for() -> None:
    queues = QueueColumns(1)
    queues.set(0, [(0.0, 4_000)], 1_000, NOMINAL)
    assert queues.ahead(1e9, 0.0).tokens[0] == 1_000


def crowded(count: int = 40, output: int = 2_000, capacity: int = 400_000) -> ClusterView:
    """Return one instance with all the requests and an idle one."""
    held = tuple(request(f"r{n}", "w0", 1_000, output, Phase.REASONING) for n in range(count))
    return cluster(instance("w0", held, capacity=capacity), instance("w1"))


def test_an_arrival_yields_by_what_is_left_of_the_queue() -> None:
    """Nearly all of the long prompt is computed, so the new one yields to it only briefly."""
    queues, length = QueueColumns(1), 40_000
    queues.set(0, [(0.0, length)], 1_000, NOMINAL)
    due, own_s = due_s(0.0, length, 0.0), nominal_s(1_000, 1_000_000)
    left_s = nominal_s(1_000, length * length - (length - 1_000) ** 2)
    yields_s = due_s(0.0, 1_000, left_s)
    assert yields_s < due_s(0.0, 1_000, 10.0)
    assert queues.ahead(own_s, due - yields_s - 0.01).behind[0] == 1
    assert queues.ahead(own_s, due - yields_s + 0.01).behind[0] == 0


# ---- moves


def expected_gain_s(
    costs: Costs, request: RequestView, source: InstanceView, target: InstanceView, margin: float
) -> float:
    """Return what moving a request saves beyond what rule 4 requires."""
    tokens, remaining = request.context_tokens, request.predicted_remaining_tokens
    if remaining is None:
        remaining = max(costs.expected_tokens, float(request.output_tokens))
    remaining = min(remaining, float(HORIZON.length))
    growth = min(remaining, costs.expected_tokens)

    def cost_s(where: InstanceView, requests: int, more_tokens: float) -> float:
        held = where.kv_used_tokens + where.prefill_backlog_tokens
        held -= tokens if where is source else 0
        decode_s = remaining * slowdown_s(costs.steps_of(where), requests, max(0, held), tokens)
        return decode_s + expected_shortage_s(costs, where, more_tokens + where.host_kv_tokens)

    saved_s = cost_s(source, max(0, source.load - 1), growth)
    saved_s -= cost_s(target, target.load, tokens + growth)
    return saved_s - margin * (1 + request.epoch) * costs.transfer_s(source, tokens)


@quick
@given(view=fleets(all_active=True, least=2), margin=st.sampled_from([0.0, 2.0]), seed=st.integers(0, 9))
def test_from_each_source_the_request_moves_that_saves_most(
    view: ClusterView, margin: float, seed: int
) -> None:
    rng = random.Random(seed)
    swapped = [rng.choice((0, 0, 20_000)) for _ in view.instances]
    members = zip(view.instances.values(), swapped, strict=True)
    view = cluster(*(dataclasses.replace(i, host_kv_tokens=tokens) for i, tokens in members))
    offers, names = offers_of(view), list(view.instances)
    prices_s = offers.prices_s()
    for move in rebalance(offers, view, prices_s, margin):
        source, target = view.instances[move.source_id], view.instances[move.target_id]
        assert prices_s[offers.at[move.target_id]] < prices_s[offers.at[move.source_id]]
        ledger = Ledger(view.instances, TRANSFERS, TRANSFERS)
        gains_s = {
            held.request_id: expected_gain_s(COSTS, held, source, target, margin)
            for held in source.requests
            if movable(held) and ledger.may_send(source, held) and ledger.may_receive(target, held)
        }
        assert gains_s[move.request_id] == pytest.approx(max(gains_s.values()), rel=1e-6, abs=1e-9)
        assert gains_s[move.request_id] > -1e-9
    # Nothing moves where nothing is saved.
    if all(
        expected_gain_s(COSTS, held, source, target, margin) <= 0.0
        for source in view.instances.values()
        for target in view.instances.values()
        for held in source.requests
    ):
        assert not rebalance(offers, view, prices_s, margin), names


@quick
@given(view=fleets() | clusters())
def test_prices_are_the_cost_of_one_more_request_of_mean_length(view: ClusterView) -> None:
    for here, price_s in zip(view.instances.values(), offers_of(view).prices_s().tolist(), strict=True):
        mean, held = (
            here.context_tokens // max(1, here.load),
            here.kv_used_tokens + here.prefill_backlog_tokens,
        )
        expected_s = COSTS.expected_tokens * slowdown_s(COSTS.steps_of(here), here.load, held, mean)
        expected_s += expected_shortage_s(COSTS, here, mean + COSTS.expected_tokens)
        active = here.state is InstanceState.ACTIVE
        assert price_s == (pytest.approx(expected_s) if active else inf)


def test_a_migration_must_save_more_than_its_transfer_costs() -> None:
    moves = Tailrace().on_tick(crowded(), 0.0)
    assert [(m.source_id, m.target_id) for m in moves if isinstance(m, Migrate)] == [("w0", "w1")]
    offers = offers_of(crowded(), Costs(NOMINAL, 0.15, link_bytes_per_s=1e6))
    assert rebalance(offers, crowded(), offers.prices_s(), 2.0) == []


def changed(view: ClusterView, **fields: object) -> ClusterView:
    """Return the view with these fields in the requests of its first instance."""
    first, *others = view.instances.values()
    held = tuple(dataclasses.replace(r, **fields) for r in first.requests)  # type: ignore[arg-type]
    return cluster(dataclasses.replace(first, requests=held), *others)


def test_a_migrated_request_must_gain_more_to_migrate_again() -> None:
    assert Tailrace(margin=0.5).on_tick(crowded(3, 100), 0.0)
    assert not Tailrace(margin=0.5).on_tick(changed(crowded(3, 100), epoch=1_000), 0.0)


def test_a_request_leaves_an_instance_short_of_memory() -> None:
    """PASCAL's reason to migrate, expressed in seconds: the request, or one that was swapped out, would wait
    for KV."""
    view = changed(crowded(8, 2_000, capacity=8 * 3_000 + 64), predicted_remaining_tokens=20.0)
    assert not Tailrace().on_tick(view, 0.0)
    tight = dataclasses.replace(view.instances["w0"], host_kv_tokens=20_000)
    assert Tailrace().on_tick(cluster(tight, view.instances["w1"]), 0.0)


def test_a_request_about_to_finish_stays() -> None:
    assert not Tailrace().on_tick(changed(crowded(), predicted_remaining_tokens=1.0), 0.0)


def loaded(name: str, requests: int = 40) -> InstanceView:
    """Return an instance whose requests would all gain by leaving."""
    held = tuple(request(f"{name}-{n}", name, 1_000, 2_000, Phase.REASONING) for n in range(requests))
    return instance(name, held)


def test_a_tick_moves_one_request_from_each_of_the_most_expensive_instances() -> None:
    sources = [loaded(f"s{n:02}", 40 + n) for n in range(SOURCES + 2)]
    idle = [instance(f"t{n:02}") for n in range(SOURCES + 2)]
    moves = Tailrace().on_tick(cluster(*sources, *idle), 0.0)
    most = [f"s{n:02}" for n in range(SOURCES + 1, 1, -1)]
    assert [move.source_id for move in moves if isinstance(move, Migrate)] == most
    assert len({move.target_id for move in moves if isinstance(move, Migrate)}) == SOURCES


def test_a_source_asks_the_three_cheapest_instances() -> None:
    full = [instance(f"t{n}", migrations=(TRANSFERS, 0)) for n in range(BIDDERS)]
    last = instance("t9", (request("x", "t9"),))
    assert not Tailrace().on_tick(cluster(loaded("s"), *full, last), 0.0)
    assert Tailrace().on_tick(cluster(loaded("s"), *full[1:], last), 0.0)


@pytest.mark.parametrize(("arriving", "leaving", "moves"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 2, 0)])
def test_instances_do_not_exchange_requests(arriving: int, leaving: int, moves: int) -> None:
    """Something migrates to the source, and something leaves the target."""
    source = dataclasses.replace(loaded("s"), migrations_in=arriving)
    target = instance("t", migrations=(0, leaving))
    assert len(Tailrace().on_tick(cluster(source, target), 0.0)) == moves


def test_nothing_moves_where_no_instance_may_receive() -> None:
    view = crowded()
    receiving = dataclasses.replace(view.instances["w1"], migrations_in=TRANSFERS)
    assert not Tailrace().on_tick(cluster(view.instances["w0"], receiving), 0.0)
