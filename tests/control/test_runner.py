"""Calls of a policy: decision points, views, and handling of its decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tailrace.actions import (
    Action,
    Migrate,
    Offer,
    Place,
    Placement,
    Refuse,
    ReturnPrompts,
    SetPool,
    WhenFull,
)
from tailrace.cluster import Arrival, ClusterView, HotPrefixes, InstanceState, InstanceView, Pool, RequestView
from tailrace.control.admission import TtftAdmission
from tailrace.control.answers import Answer, BadAnswer, may_place
from tailrace.control.cluster_model import ClusterModel
from tailrace.control.guard import PlainCalls, PolicyGuard
from tailrace.control.runner import Asked, DecisionPoint, Moment, PlaceQuestion, PolicyRunner, Question, ask
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.base import Policy
from tailrace.policy.registry import Declared, declared
from tests.policy.fleets import cluster, instance, request

ARRIVAL = Arrival("r", 10, 10, 0, model="m")
MOVE = Migrate("r", "a", "b", "test")
REQUEST = request("r", "a")


class Placing(Policy):
    """A policy without handlers for the other decision points."""

    when_full = WhenFull.HOST

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("a")


class Everywhere(Placing):
    """A policy that returns a migration naming the decision point."""

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return (replace(MOVE, reason="prefill done"),)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return (replace(MOVE, reason="reasoning ended"),)

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return (replace(MOVE, reason="length boundary"),)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        return (replace(MOVE, reason=f"tick at {now:g} after {view.last_tick_s}"),)


class Broken(Policy):
    """A policy that always raises."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        raise RuntimeError("an error")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        raise RuntimeError("an error")


class Model(ClusterModel[None]):
    """A cluster model that records which views are requested."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[tuple[str, float]] = []
        self.view = cluster(instance("a", (REQUEST,)), instance("b"))

    def view_at(self, now_s: float) -> ClusterView:
        self.requested.append(("all", now_s))
        return self.view

    def view_for_arrival(self, model: str, now_s: float) -> ClusterView:
        self.requested.append((f"model {model}", now_s))
        return self.view

    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView:
        self.requested.append((f"request on {instance_id}", now_s))
        return self.view

    def hot_prefixes(self, now_s: float) -> HotPrefixes | None:
        return None

    def _instance_view(self, instance_id: str) -> InstanceView:
        raise NotImplementedError


class Active:
    """The active policy with its name."""

    def __init__(self, policy: Policy, admission: TtftAdmission | None = None) -> None:
        self.policy, self.name, self.admission = policy, type(policy).__name__, admission

    @property
    def declared(self) -> Declared:
        return declared(self.name, self.policy)


class Log:
    """Record submitted actions and observed decisions in one list."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        self.lines.append(
            ("submit", [a.reason for a in actions if isinstance(a, Migrate)], policy, when_full)
        )

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None:
        assert isinstance(question, (PlaceQuestion, Question))
        self.lines.append(("answered", policy, question.point, question.now_s, answer))


class CallLog:
    """Record calls and failures by decision point."""

    def __init__(self) -> None:
        self.calls: list[DecisionPoint] = []
        self.failures: list[tuple[str, DecisionPoint]] = []

    def observe_duration(self, point: DecisionPoint, seconds: float) -> None:
        assert 0.0 <= seconds < 60.0
        self.calls.append(point)

    def failed(self, policy: str, point: DecisionPoint, why: str) -> None:
        self.failures.append((policy, point))


def runner_of(policy: Policy) -> tuple[PolicyRunner, Model, Active, Log]:
    model, deciding, log = Model(), Active(policy), Log()
    return PolicyRunner(model, deciding, log, PlainCalls()), model, deciding, log


def test_a_decision_point_without_handler_needs_no_view() -> None:
    runner, model, _, log = runner_of(Placing())
    for point in (DecisionPoint.PREFILL_DONE, DecisionPoint.REASONING_ENDED, DecisionPoint.LENGTH_BOUNDARY):
        assert not runner.has_handler(point)
        runner.request_changed(point, REQUEST, Moment(1.0, 2.0))
    assert not runner.has_handler(DecisionPoint.TICK)
    assert (model.requested, log.lines) == ([], [])
    # With a watcher, every question is evaluated.
    runner.watchers.append(log)
    assert runner.has_handler(DecisionPoint.TICK)
    runner.request_changed(DecisionPoint.PREFILL_DONE, REQUEST, Moment(1.0, 2.0))
    assert model.requested == [("request on a", 1.0)]
    # Nothing is decided and nothing is submitted.
    assert log.lines == [("answered", "Placing", DecisionPoint.PREFILL_DONE, 2.0, ())]


def test_actions_of_each_decision_point_are_observed_then_submitted() -> None:
    runner, _, _, log = runner_of(Everywhere())
    runner.watchers.append(log)
    for point, reason in (
        (DecisionPoint.PREFILL_DONE, "prefill done"),
        (DecisionPoint.REASONING_ENDED, "reasoning ended"),
        (DecisionPoint.LENGTH_BOUNDARY, "length boundary"),
    ):
        assert runner.has_handler(point)
        log.lines.clear()
        runner.request_changed(point, REQUEST, Moment(1.0, 2.0))
        assert log.lines == [
            ("answered", "Everywhere", point, 2.0, (replace(MOVE, reason=reason),)),
            ("submit", [reason], "Everywhere", WhenFull.HOST),
        ]


def test_a_placement_uses_the_view_of_its_model_and_is_returned() -> None:
    runner, model, _, log = runner_of(Placing())
    runner.watchers.append(log)
    assert runner.place(ARRIVAL, Moment(1.0, 2.0)) == Place("a")
    assert model.requested == [("model m", 1.0)]
    assert log.lines == [("answered", "Placing", DecisionPoint.PLACE, 2.0, Place("a"))]


def test_actions_of_a_late_placement_are_submitted() -> None:
    class Moving(Placing):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
            return Place("a", (MOVE,))

    log = Log()
    late = TtftAdmission(0.5)
    model = Model()
    loaded = replace(instance("a", (REQUEST,)), ttft=TtftPredictor(1.0, 0.0, 0.0))
    model.view = cluster(loaded, instance("b"))
    runner = PolicyRunner(model, Active(Moving(), late), log, PlainCalls())
    runner.watchers.append(log)
    refused = runner.place(ARRIVAL, Moment(1.0, 2.0))
    assert isinstance(refused, Refuse) and refused.final
    # Watchers compare policies, so they see the policy's decision.
    assert log.lines == [
        ("answered", "Moving", DecisionPoint.PLACE, 2.0, Place("a", (MOVE,))),
        ("submit", ["test"], "Moving", WhenFull.REFUSE),
    ]
    admitted = replace(ARRIVAL, admitted=True)
    assert runner.place(admitted, Moment(1.0, 2.0)) == Place("a", (MOVE,))


def test_nothing_is_refused_by_reports_that_are_out_of_date() -> None:
    class OutOfDate(Model):
        def is_out_of_date(self, now_s: float) -> bool:
            return now_s > 5.0

    model = OutOfDate()
    model.view = cluster(replace(instance("a"), ttft=TtftPredictor(1.0, 0.0, 0.0)))
    runner = PolicyRunner(model, Active(Placing(), TtftAdmission(0.5)), Log(), PlainCalls())
    assert isinstance(runner.place(ARRIVAL, Moment(5.0, 2.0)), Refuse)
    assert runner.place(ARRIVAL, Moment(5.5, 2.5)) == Place("a")


def test_a_tick_sees_the_time_of_the_last_one_of_the_same_policy() -> None:
    runner, model, deciding, log = runner_of(Everywhere())

    def reason() -> object:
        return log.lines[-1][1]

    runner.tick(Moment(1.0, 10.0))
    assert reason() == ["tick at 10 after None"]
    assert runner.last_tick_s == 10.0
    runner.tick(Moment(2.0, 11.0))
    assert reason() == ["tick at 11 after 10.0"]
    assert model.requested == [("all", 1.0), ("all", 2.0)]
    deciding.policy = Everywhere()
    assert runner.last_tick_s is None
    runner.tick(Moment(3.0, 12.0))
    assert reason() == ["tick at 12 after None"]
    runner.last_tick_s = 5.0
    runner.tick(Moment(4.0, 13.0))
    assert reason() == ["tick at 13 after 5.0"]
    runner.last_tick_s = None
    runner.tick(Moment(5.0, 14.0))
    assert reason() == ["tick at 14 after None"]


def test_a_failed_policy_is_replaced_by_the_fallback_and_counted() -> None:
    metrics, view = CallLog(), cluster(instance("a", (REQUEST,)), instance("b"))
    calls = PolicyGuard(metrics)
    assert calls.place(Active(Broken()), PlaceQuestion(view, ARRIVAL, 0.0)) == Place("b")
    assert calls.ask(Active(Broken()), Question(DecisionPoint.PREFILL_DONE, view, REQUEST, 0.0)) is None
    assert metrics.failures == [("Broken", DecisionPoint.PLACE), ("Broken", DecisionPoint.PREFILL_DONE)]
    assert metrics.calls == [DecisionPoint.PLACE, DecisionPoint.PREFILL_DONE]
    log = Log()
    runner = PolicyRunner(Model(), Active(Broken()), log, calls)
    runner.watchers.append(log)
    runner.request_changed(DecisionPoint.PREFILL_DONE, REQUEST, Moment(0.0, 0.0))
    assert log.lines == [("answered", "Broken", DecisionPoint.PREFILL_DONE, 0.0, None)]


def test_valid_decisions_pass_unchanged() -> None:
    metrics, view = CallLog(), cluster(instance("a", (REQUEST,)), instance("b"))
    calls = PolicyGuard(metrics)
    assert calls.place(Active(Everywhere()), PlaceQuestion(view, ARRIVAL, 0.0)) == Place("a")
    question = Question(DecisionPoint.PREFILL_DONE, view, REQUEST, 0.0)
    assert calls.ask(Active(Everywhere()), question) == (replace(MOVE, reason="prefill done"),)
    assert metrics.failures == []
    assert metrics.calls == [DecisionPoint.PLACE, DecisionPoint.PREFILL_DONE]


class Refusing(Policy):
    """A policy that refuses every request."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Refuse("full")


def test_refusals_pass_and_invalid_placements_are_replaced() -> None:
    metrics = CallLog()
    calls = PolicyGuard(metrics)
    view = cluster(instance("a", state=InstanceState.DRAINING), instance("b"))
    assert calls.place(Active(Refusing()), PlaceQuestion(view, ARRIVAL, 0.0)) == Refuse("full")
    assert metrics.failures == []
    assert calls.place(Active(Placing()), PlaceQuestion(view, ARRIVAL, 0.0)) == Place("b")
    assert metrics.failures == [("Placing", DecisionPoint.PLACE)]


@pytest.mark.parametrize(
    ("name", "allowed"), [("a", True), ("b", False), ("c", False), ("d", False), ("unknown", False)]
)
def test_instances_that_may_get_an_arrival(name: str, allowed: bool) -> None:
    view = cluster(
        instance("a"),
        instance("b", state=InstanceState.DRAINING),
        instance("c", state=InstanceState.SUSPECT),
        instance("d"),
    )
    assert may_place(view, replace(ARRIVAL, excluded=frozenset({"d"})), name) is allowed


class Moving(Everywhere):
    """A policy that moves requests in every way, beside what is no move."""

    STAYS = SetPool("b", Pool.DECODE)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("b", (MOVE, self.STAYS), "a")

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        return (Offer("r", "a", ("b",), "test"), self.STAYS, ReturnPrompts("a", ("r",)))


def test_a_policy_that_is_to_move_nothing_keeps_its_other_actions() -> None:
    policy, view = Moving(), Model().view
    arriving = PlaceQuestion(view, ARRIVAL, 0.0)
    ticking = Question(DecisionPoint.TICK, view, None, 0.0)
    done = Question(DecisionPoint.PREFILL_DONE, view, REQUEST, 0.0)
    assert ask(policy, arriving) == Place("b", (MOVE, policy.STAYS), "a")
    assert len(ask(policy, ticking)) == 3 and len(ask(policy, done)) == 1
    policy.moves = False
    assert ask(policy, arriving) == Place("b", (policy.STAYS,), "a")
    assert ask(policy, ticking) == (policy.STAYS,) and ask(policy, done) == ()


def test_what_a_policy_says_about_its_moves_cannot_hurt() -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise SystemExit

    policy = Moving()
    policy.moves = Undecided()  # type: ignore[assignment]
    with pytest.raises(BadAnswer, match="SystemExit"):
        ask(policy, Question(DecisionPoint.PREFILL_DONE, Model().view, REQUEST, 0.0))


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (replace(MOVE, reason="a line\nand another"), "not printable"),
        (replace(MOVE, reason="\x1b[31m"), "not printable"),
        (ReturnPrompts("a", ("r",) * 100_001), "request_ids: has more than 100,000"),
        (ReturnPrompts("a", ("r" * 1_001,)), "request_ids: one has more than 1,000 characters"),
    ],
)
def test_texts_of_actions_are_bounded_and_printable(action: Action, problem: str) -> None:
    class Telling(Placing):
        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            return (action,)

    with pytest.raises(BadAnswer, match=problem):
        ask(Telling(), Question(DecisionPoint.TICK, Model().view, None, 0.0))
