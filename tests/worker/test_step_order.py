"""A worker orders its batch as the simulator does: the same state gives the same decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.instance
import tailrace.intra.registry as intra_registry
from simulator.cluster import InstanceSpec
from simulator.events import EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.request import SimRequest
from simulator.steptime import StepTime
from tailrace.cluster import Phase
from tailrace.intra.allocate import Claim, Grants, Room, allocate
from tailrace.intra.base import IntraPolicy, JobView, Rank, TokenIntervals
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.guarded import Asked
from tailrace.intra.orders import Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.intra.registry import INTRA_POLICIES, UnknownIntraError, make_intra
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value
from tailrace.policy.registry import choose
from tailrace.policy.registry import names as policy_names
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tests.simulator.worlds import INTRA, PROFILE
from tests.worker.orders import ByLength, Stingy
from worker_agent import intra_switch
from worker_agent.engine.step_order import Device, StepOrder, StepPlan
from worker_agent.engine.turns import Turn, arrival_order, view_of
from worker_agent.intra_switch import BY_POLICY, IntraSwitch, order_of_policy, restart_without

BLOCK = 4
STEP_TOKENS = 40


@dataclass(frozen=True)
class Facts:
    """The state of one request, for both the worker and the simulator."""

    arrival: int
    prompt: int
    reasoning: int
    tokens: int
    # decoding, prefilling, swapped, queued.
    place: str
    # Computed tokens of prompt and output (prefilling only).
    computed: int
    # Blocks granted to later requests so far (waiting only).
    passed: int = 0
    answering_s: float = 0.0
    lapsed: bool = False

    @property
    def total(self) -> int:
        return self.prompt + self.tokens

    @property
    def blocks(self) -> int:
        return -(-self.total // BLOCK)


@st.composite
def facts(draw: st.DrawFn) -> list[Facts]:
    """Draw up to ten requests, in any order of arrival."""
    count = draw(st.integers(1, 10))
    requests = []
    for arrival in draw(st.permutations(range(count))):
        place = draw(st.sampled_from(["decoding", "decoding", "prefilling", "swapped", "queued"]))
        prompt = draw(st.integers(2, 60))
        least = 1 if place in ("decoding", "swapped") else 0
        tokens = draw(st.integers(least, 80)) if draw(st.booleans()) else least
        computed = draw(st.integers(0, prompt + tokens - 2)) if place == "prefilling" else 0
        reasoning = draw(st.sampled_from([0, 3, 40, 200]))
        passed = draw(st.integers(0, 20)) if place in ("swapped", "queued") else 0
        answering_s = draw(st.floats(1.0, 100.0))
        requests.append(
            Facts(
                arrival, prompt, reasoning, tokens, place, computed, passed, answering_s, draw(st.booleans())
            )
        )
    return requests


class Member:
    """A request with the attributes of vLLM's."""

    def __init__(self, request: Facts) -> None:
        self.facts = request
        self.num_tokens = request.total
        self.num_output_tokens = request.tokens
        self.num_output_placeholders = 0
        waits = request.place in ("swapped", "queued")
        computed = request.total - 1 if request.place == "decoding" else request.computed
        self.num_computed_tokens = 0 if waits else computed
        self.wait_for_budget = turn_of(request)
        self.wait_for_budget.passed_blocks = request.passed


def turn_of(it: Facts) -> Turn:
    turn = Turn(it.arrival)
    turn.answering_s, turn.lapsed = it.answering_s, it.lapsed
    return turn


def view(member: Member) -> JobView:
    it = member.facts
    return view_of(turn_of(it), it.tokens < it.reasoning, it.prompt, it.tokens, min(it.tokens, it.reasoning))


def rank_of(policy: IntraPolicy, member: Member) -> Rank:
    turn = turn_of(member.facts)
    turn.update(policy, view(member))
    return turn.rank


def order_for(
    policy: IntraPolicy, exempt: frozenset[int] = frozenset(), intervals: TokenIntervals | None = None
) -> StepOrder[Member]:
    return StepOrder(
        policy,
        BLOCK,
        lambda member: rank_of(policy, member),
        lambda member: member.wait_for_budget,
        lambda member: -(-member.num_computed_tokens // BLOCK),
        lambda member: member.facts.place == "swapped",
        lambda member: member.facts.arrival in exempt,
        view,
        lambda: intervals,
    )


def worker_plan(
    policy: IntraPolicy,
    state: list[Facts],
    total: int,
    slots: int,
    exempt: frozenset[int] = frozenset(),
    entering: int = 0,
    interval_s: float = 0.0,
) -> StepPlan[Member]:
    """Return the worker's decisions, if tokens come `interval_s` apart."""
    members = [Member(each) for each in state]
    running = [m for m in members if m.facts.place in ("decoding", "prefilling")]
    waiting = sorted(
        ((rank_of(policy, m), m) for m in members if m not in running), key=lambda entry: entry[0]
    )
    held = sum(-(-m.num_computed_tokens // BLOCK) for m in running)
    prompts = [m for m in running if m.facts.place == "prefilling"]
    promised = sum(m.facts.blocks - -(-m.num_computed_tokens // BLOCK) for m in prompts)
    device = Device(total, total - held, promised, slots - len(running), entering, STEP_TOKENS)
    intervals = TokenIntervals(0.0, interval_s, StepTime(PROFILE, None).shortest_s) if interval_s else None
    return order_for(policy, exempt, intervals).plan(running, waiting, device)


def computed(plan: StepPlan[Member]) -> dict[int, int]:
    """Return the tokens computed of each request in the step: first running, then admitted ones."""
    tokens = {member.facts.arrival: 0 for member in plan.withheld}
    left = plan.step_tokens
    for member in (*plan.running, *plan.admit):
        want = 1 if member.facts.place == "swapped" else member.num_tokens - member.num_computed_tokens
        tokens[member.facts.arrival] = chunk = min(want, left, plan.longest_chunk or left)
        left -= chunk
    return tokens


def simulator_grants(
    policy: IntraPolicy,
    state: list[Facts],
    total: int,
    slots: int,
    interval_s: float,
    monkeypatch: pytest.MonkeyPatch,
    leaving: frozenset[int] = frozenset(),
) -> Grants[Job]:
    """Return the simulator's decisions, as its instance makes them at a step boundary, while these arrivals
    are migrated."""
    spec = InstanceSpec(
        "i", PROFILE, total * BLOCK, BLOCK, max_num_seqs=slots, chunk_budget_tokens=STEP_TOKENS
    )
    instance = Instance(spec, policy, EventQueue(), IgnoringListener())
    for each in state:
        request = SimRequest(str(each.arrival), 0.0, each.prompt, each.reasoning, each.tokens + 500)
        job = Job(request, each.arrival)
        job.tokens = each.tokens
        job.first_token_s = job.reasoning_end_s = each.answering_s
        job.lapsed = each.lapsed
        job.migrating = each.arrival in leaving
        job.instance_id = instance.instance_id
        job.prefill_total = each.total
        if each.place == "decoding":
            instance._batch.join(job)
        elif each.place == "prefilling":
            job.state, job.blocks, job.prefill_done = JobState.PREFILLING, each.blocks, each.computed
            instance._other_blocks += job.blocks
            job.rank_at(job.tokens, policy)
            instance._prompts.place(job)
        else:
            swapped = each.place == "swapped"
            job.state = JobState.SWAPPED if swapped else JobState.QUEUED
            job.blocks = each.blocks if swapped else 0
            instance._enqueue(job)
            job.passed_blocks = each.passed
    recorded: list[Grants[Job]] = []

    def record(
        policy: IntraPolicy,
        running: Callable[[], Sequence[Claim[Job]]],
        waiting: Iterable[Claim[Job]],
        room: Room,
        prefilling: Iterable[tuple[Rank, int]],
    ) -> Grants[Job]:
        recorded.append(allocate(policy, running, waiting, room, prefilling))
        return recorded[-1]

    with monkeypatch.context() as patch:
        patch.setattr(simulator.instance, "allocate", record)
        patch.setattr(instance, "token_interval_s", lambda now: interval_s)
        instance._allocate(0.0)
    return recorded[0]


class IgnoringListener:
    """Listener that ignores all events."""

    def hear(self, instance: Instance, job: Job, now: float) -> None:
        pass

    prefill_done = reasoning_ended = stage_outgrown = finished = preempted = hear


ORDERS = {
    **{name: make() for name, make in INTRA_POLICIES.items()},
    **INTRA,
    "limited": EarliestDue(tpot_limit=0.5, tpot_slo_s=0.1),
}


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_worker_decides_as_the_simulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ORDERS[name]

    @settings(max_examples=150, deadline=None)
    @given(facts(), st.integers(-6, 40), st.integers(-1, 3), st.sampled_from([0.0, 0.04, 0.06]))
    def check(state: list[Facts], spare: int, slots: int, interval_s: float) -> None:
        running = [each for each in state if each.place in ("decoding", "prefilling")]
        total = max(1, sum(each.blocks for each in running) + spare)
        places = max(1, len(running) + slots)
        plan = worker_plan(policy, state, total, places, interval_s=interval_s)
        grants = simulator_grants(policy, state, total, places, interval_s, monkeypatch)
        assert [m.facts.arrival for m in plan.preempt] == [job.order for job in grants.preempt]
        # Swapped requests first, each kind in order of admission.
        admitted = [job.order for job in grants.admit]
        swapped = {each.arrival for each in state if each.place == "swapped"}
        expected = [n for n in admitted if n in swapped] + [n for n in admitted if n not in swapped]
        assert [m.facts.arrival for m in plan.admit] == expected
        assert all(member.wait_for_budget.passed_blocks == 0 for member in plan.admit)
        served = plan.running + plan.withheld
        assert {m.facts.arrival for m in served} == {each.arrival for each in running} - {
            m.facts.arrival for m in plan.preempt
        }
        made = computed(plan)
        # A token is left for each returning request.
        assert all(made[n] == 1 for n in admitted if n in swapped) or not plan.running
        # Prompts share the rest in order of rank, except one that is withheld so as not to shorten another.
        prompts = [m for m in (*served, *plan.admit) if m.facts.place in ("prefilling", "queued")]
        left = plan.step_tokens - (len(served) + len(plan.admit) - len(prompts))
        for member in sorted(prompts, key=lambda m: rank_of(policy, m)):
            chunk = min(left, member.num_tokens - member.num_computed_tokens)
            left -= chunk
            assert made[member.facts.arrival] in ((0, chunk) if member in plan.withheld else (chunk,))

    check()


def test_reasoning_precedes_answering_unless_demoted() -> None:
    policy = PascalQueue(quantum_tokens=10, demotion_tokens=50)
    waiting = [
        Facts(0, 10, 0, 5, "swapped", 0),  # answers
        Facts(1, 10, 100, 60, "swapped", 0),  # demoted
        Facts(2, 10, 100, 25, "swapped", 0),  # reasons, third quantum
        Facts(3, 10, 100, 5, "swapped", 0),  # reasons, first quantum
        Facts(4, 10, 100, 0, "queued", 0),  # a prompt
    ]
    order = sorted(waiting, key=lambda each: rank_of(policy, Member(each)))
    assert [each.arrival for each in order] == [3, 4, 2, 0, 1]


def test_used_quantum_yields_and_an_unused_one_does_not() -> None:
    state = [Facts(0, 8, 0, 12, "decoding", 0), Facts(1, 8, 0, 0, "queued", 0)]
    full = state[0].blocks + 1
    fresh = worker_plan(QuantumRoundRobin(quantum_tokens=20), state, full, 8)
    assert (fresh.preempt, fresh.admit) == ([], [])
    used = worker_plan(QuantumRoundRobin(quantum_tokens=10), state, full, 8)
    assert [m.facts.arrival for m in used.preempt] == [0]
    assert [m.facts.arrival for m in used.admit] == [1]
    exported = worker_plan(QuantumRoundRobin(quantum_tokens=10), state, full, 8, frozenset([0]))
    assert (exported.preempt, exported.admit) == ([], [])


def test_prompt_leaves_a_token_for_a_returning_request() -> None:
    state = [Facts(0, 60, 0, 0, "prefilling", 8), Facts(1, 8, 0, 9, "swapped", 0)]
    assert computed(worker_plan(make("fcfs"), state, 100, 8)) == {0: STEP_TOKENS - 1, 1: 1}


def test_prompt_leaves_a_token_for_an_entering_request() -> None:
    plan = worker_plan(make("fcfs"), [Facts(0, 60, 0, 0, "prefilling", 8)], 100, 8, entering=2)
    assert (computed(plan), plan.step_tokens) == ({0: STEP_TOKENS - 2}, STEP_TOKENS)


def test_overtaking_prompt_is_computed_before_one_that_has_begun() -> None:
    long, short = Facts(0, 4_000, 0, 0, "prefilling", 8), Facts(1, 10, 0, 0, "queued", 0)
    fcfs = worker_plan(make("fcfs"), [long, short], 2_000, 8)
    assert (computed(fcfs), fcfs.admit) == ({0: STEP_TOKENS}, [])
    assert computed(worker_plan(ByLength(), [long, short], 2_000, 8)) == {0: STEP_TOKENS - 10, 1: 10}
    # If the new one gets more of the step than is left for the other, the other is withheld.
    middling = Facts(1, 30, 0, 0, "queued", 0)
    assert computed(worker_plan(ByLength(), [long, middling], 2_000, 8)) == {0: 0, 1: 30}


def test_step_is_never_empty() -> None:
    """Without a budget a single prompt still continues, but waits while others decode."""
    prompt, decode = Facts(0, 60, 0, 0, "prefilling", 8), Facts(1, 8, 0, 4, "decoding", 0)
    assert computed(worker_plan(Stingy(0), [prompt], 100, 8)) == {0: 1}
    assert computed(worker_plan(Stingy(0), [prompt, decode], 100, 8)) == {0: 0, 1: 1}


def make(name: str) -> IntraPolicy:
    policy = make_intra(name)
    assert policy is not None
    return policy


def test_rank_is_computed_again_when_it_may_have_changed() -> None:
    policy = PascalQueue(quantum_tokens=10)
    turn = Turn(7)
    turn.update(policy, view_of(turn, True, 20, 3, 3))
    assert turn.rank == (0, 0, 7)
    assert turn.is_current(policy, Phase.REASONING, 9)
    assert not turn.is_current(policy, Phase.REASONING, 10)
    assert not turn.is_current(policy, Phase.ANSWERING, 9)
    assert not turn.is_current(PascalQueue(quantum_tokens=10), Phase.REASONING, 9)


def test_arrivals_are_ordered_by_time_and_distinct() -> None:
    assert arrival_order(1.0, 5) < arrival_order(1.000001, 0)
    assert arrival_order(1.0, 0) < arrival_order(1.0, 1)


# ---- names


def test_every_policy_has_an_order() -> None:
    orders = {name: choose(name).order for name in policy_names()}
    assert (orders["pascal"], orders["arrow"], orders["ares"]) == ("pascal", "decode_first", "vllm")
    for order in orders.values():
        make_intra(order)
    with pytest.raises(UnknownIntraError, match="known: "):
        make_intra("nonsense")


def test_order_of_a_policy_gets_its_own_parameters() -> None:
    assert order_of_policy(None) == ("vllm", {})
    assert order_of_policy(PolicyRecord(name="cascade", parameters={"outlier": 2.0})) == ("vllm", {})
    parameters: dict[str, Value] = {"quantum_tokens": 200, "growth_tokens": 9}
    order = order_of_policy(PolicyRecord(name="pascal", parameters=parameters))
    assert order == ("pascal", {"quantum_tokens": 200})
    # Another order takes those that it has.
    assert (
        order_of_policy(PolicyRecord(name="least_loaded+pascal", parameters={"quantum_tokens": 200})) == order
    )
    assert order_of_policy(PolicyRecord(name="pascal+fcfs", parameters=parameters)) == ("fcfs", {})


@pytest.mark.parametrize(("decoding", "leaving", "admitted"), [(4, 0, False), (3, 0, True), (5, 2, True)])
def test_prompt_waits_beside_four_that_decode_and_stay(
    decoding: int, leaving: int, admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = [Facts(n, 10, 0, 5, "decoding", 0) for n in range(decoding)]
    state.append(Facts(decoding, 10, 0, 0, "queued", 0))
    away = frozenset(range(leaving))
    policy = ORDERS["limited"]
    plan = worker_plan(policy, state, 1_000, 64, away, interval_s=0.06)
    grants = simulator_grants(policy, state, 1_000, 64, 0.06, monkeypatch, away)
    assert [m.facts.arrival for m in plan.admit] == ([decoding] if admitted else [])
    assert [job.order for job in grants.admit] == ([decoding] if admitted else [])
    assert plan.keeps_back == (grants.kept_back > 0) == (not admitted)


async def test_unknown_policy_leaves_the_engine_its_own_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = PolicyRecord(name="a_users_own")
    orders: list[str] = []
    order = IntraSwitch(BY_POLICY, lambda: record, Slo, lambda name, _, __: orders.append(name))
    await order.update()
    await order.update()
    assert caplog.text.count("unknown policy 'a_users_own'") == 1
    record = PolicyRecord(name="pascal")
    await order.update()
    assert orders == ["vllm", "pascal"]


async def test_engine_is_notified_only_of_changes(caplog: pytest.LogCaptureFixture) -> None:
    notified: list[tuple[str, Mapping[str, Value], Slo]] = []
    record: PolicyRecord | None = None
    slo = Slo()

    def set_intra(name: str, parameters: Mapping[str, Value], slo: Slo) -> None:
        make_intra(name, parameters, slo)
        notified.append((name, parameters, slo))

    switch = IntraSwitch(BY_POLICY, lambda: record, lambda: slo, set_intra)
    await switch.update()
    record = PolicyRecord(name="pascal")
    await switch.update()
    await switch.update()
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 200})
    await switch.update()
    # PASCAL's order does not depend on the SLO.
    slo = Slo(1.0, 0.05)
    await switch.update()
    # From a scheduler of another version: nothing changes.
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 0})
    await switch.update()
    await switch.update()
    assert caplog.text.count("'quantum_tokens': '0' is not allowed") == 1
    assert notified == [
        ("vllm", {}, Slo()),
        ("pascal", {}, Slo()),
        ("pascal", {"quantum_tokens": 200}, Slo()),
    ]


async def test_order_that_is_set_aside_returns_and_changes_wait() -> None:
    record = PolicyRecord(name="pascal")
    orders: list[str] = []

    def set_intra(name: str, parameters: Mapping[str, Value], slo: Slo) -> None:
        make_intra(name, parameters, slo)
        orders.append(name)

    switch = IntraSwitch(BY_POLICY, lambda: record, Slo, set_intra)
    await switch.update()
    # Parameters that are not usable here leave the order before.
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 0})
    await switch.update()
    with switch.set_aside():
        await switch.update()
    assert orders == ["pascal", "vllm", "pascal"]
    # A change is being loaded when it begins.
    record = PolicyRecord(name="tailrace")
    loading = asyncio.create_task(switch.update())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError), switch.set_aside():
        await loading
        raise RuntimeError
    assert orders == ["pascal", "vllm", "pascal", "vllm", "pascal"]
    await switch.update()
    assert orders[-1] == "earliest_due"


async def test_order_that_depends_on_the_pace_is_recreated_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Paced(Fcfs):
        needs = (Fact.PACE,)

        def __init__(self, *, watermark: float = 0.01, pass_over: float = 0.0, pace_s: float = 0.1) -> None:
            super().__init__(watermark=watermark, pass_over=pass_over)
            self.pace_s = pace_s

    monkeypatch.setattr(intra_registry, "INTRA_POLICIES", {"paced": Paced})
    paces: list[float] = []
    slo = Slo()

    def set_intra(name: str, parameters: Mapping[str, Value], slo: Slo) -> None:
        made = make_intra(name, parameters, slo)
        assert isinstance(made, Paced)
        paces.append(made.pace_s)

    switch = IntraSwitch("paced", lambda: None, lambda: slo, set_intra)
    await switch.update()
    slo = Slo(1.0)
    await switch.update()
    slo = Slo(1.0, 0.05)
    await switch.update()
    assert paces == [0.1, 0.05]


@pytest.mark.parametrize("fails", [False, True])
def test_front_ends_hear_why_a_worker_runs_again(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Restarted(BaseException):
        pass

    def restart() -> None:
        raise Restarted

    def say_goodbye(reason: str) -> None:
        said.append(reason)
        if fails:
            raise OSError

    said: list[str] = []
    monkeypatch.setattr(intra_switch, "restart_process", restart)
    monkeypatch.setenv("TAILRACE_HUNG_ORDER", "")
    with pytest.raises(Restarted):
        restart_without(Asked("mine", "rank", 1), "for 2.0 s", say_goodbye)
    assert said == ["order mine has not returned from rank"]
    assert intra_switch.hung_before() == "mine"
