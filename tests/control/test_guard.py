"""The guard: whatever a policy's package does, every request is placed, and nothing else is done."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import (
    Action,
    CopyPrefix,
    Migrate,
    Offer,
    Place,
    Refuse,
    ReturnPrompts,
    SetPool,
    SetStages,
)
from tailrace.cluster import Pool, RequestView, Stage
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.answers import ACTIONS_MAX, BadAnswer, checked_actions
from tailrace.control.guard import Budgets, PlainCalls, PolicyFailed, PolicyGuard
from tailrace.control.runner import Asked, DecisionPoint, Moment, PlaceQuestion, PolicyRunner, Question, ask
from tailrace.control.shadow import Shadow, Verdict
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.registry import Declared, UnusablePolicyError, declared
from tailrace.policy.requests import RequestTable
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tests.control.test_runner import ARRIVAL, Active, CallLog, Model
from tests.policy.fleets import cluster, instance, quick, request

REQUEST = request("r", "a")
VIEW = cluster(instance("a", (REQUEST, request("s", "a"))), instance("b"))
PLACE = PlaceQuestion(VIEW, ARRIVAL, 0.0)
QUESTIONS = (
    Question(DecisionPoint.PREFILL_DONE, VIEW, REQUEST, 0.0),
    Question(DecisionPoint.REASONING_ENDED, VIEW, REQUEST, 0.0),
    Question(DecisionPoint.LENGTH_BOUNDARY, VIEW, REQUEST, 0.0),
    Question(DecisionPoint.TICK, VIEW, None, 0.0),
)
METHODS = ("place", "on_prefill_done", "on_reasoning_ended", "on_length_boundary", "on_tick")


class Evil(Exception):
    """An exception that cannot even be described."""

    def __str__(self) -> str:
        raise SystemExit(7)

    __repr__ = __str__


class SlyText(str):
    """A text that fails when it is shortened."""

    __slots__ = ()

    def __getitem__(self, key: object) -> str:
        raise SystemExit(4)


class Sly(Exception):
    """An exception whose text is one of those."""

    def __str__(self) -> str:
        return SlyText("sly")


class NamelessKind(type):
    """A class whose name cannot be read."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__name__":
            raise SystemExit(5)
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=NamelessKind):
    """An exception of such a class."""


def recurse() -> None:
    """Recurse until the interpreter refuses."""
    recurse()


RAISED: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("x" * 10_000),
    lambda: SystemExit(3),
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    MemoryError,
    RecursionError,
    lambda: BaseExceptionGroup("several", [SystemExit(), ValueError()]),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    Evil,
    lambda: ValueError("a lone surrogate \udc80, a bell \a"),
    lambda: Sly(),
    lambda: Nameless(),
    lambda: BadAnswer("forged"),
)


class Weird:
    """An object that fails at whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)

    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt

    def __hash__(self) -> int:
        raise GeneratorExit

    def __iter__(self) -> Iterator[Any]:
        raise asyncio.CancelledError

    def __len__(self) -> int:
        raise MemoryError


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([object(), int, len, ARRIVAL, VIEW, "\ud800", 2**70, float("nan")]),
    st.builds(Weird),
)
names = st.one_of(st.sampled_from(["a", "b", "r", "s", "nobody", "", "\ud800"]), junk)
tuples = st.one_of(st.tuples(names), st.tuples(names, names), st.lists(names, max_size=2), junk)
stages = st.lists(st.one_of(st.builds(Stage, junk, junk, tuples), junk), max_size=3).map(tuple)
actions = st.one_of(
    st.builds(Migrate, names, names, names, names),
    st.builds(Offer, names, names, tuples, names, junk),
    st.builds(ReturnPrompts, names, tuples),
    st.builds(CopyPrefix, names, names, names, junk, names),
    st.builds(SetPool, names, st.one_of(st.sampled_from(Pool), junk)),
    st.builds(SetStages, st.one_of(stages, junk)),
    junk,
)
answers = st.one_of(
    junk,
    actions,
    st.lists(actions, max_size=4),
    st.lists(actions, max_size=4).map(tuple),
    st.builds(Place, names, st.one_of(st.lists(actions, max_size=2).map(tuple), junk), names),
    st.builds(Refuse, names, junk),
)


def misbehaving(answer: object, raised: Callable[[], BaseException] | None, late: bool) -> type[LeastLoaded]:
    """Return a policy of which every method answers this, or raises: at once, or while its answer is
    iterated."""

    def iterated() -> Iterator[object]:
        yield from answer if isinstance(answer, (list, tuple)) else [answer]
        assert raised is not None
        raise raised()

    def method(self: object, *arguments: object) -> object:
        if raised is None:
            return answer
        if late:
            return iterated()
        raise raised()

    return type("Misbehaving", (LeastLoaded,), dict.fromkeys(METHODS, method))


def is_sound(action: Action) -> bool:
    """Return whether the names in an action are those of the view."""
    match action:
        case Migrate() | Offer():
            targets = (action.target_id,) if isinstance(action, Migrate) else action.receiver_ids
            return (action.request_id, action.source_id) in {("r", "a"), ("s", "a")} and (
                {*targets} <= {"a", "b"}
            )
        case SetStages():
            return all(stage.lo < stage.hi and {*stage.instance_ids} <= {"a", "b"} for stage in action.stages)
        case ReturnPrompts() | SetPool():
            return action.instance_id in {"a", "b"}
        case CopyPrefix():
            return {action.holder_id, action.target_id} <= {"a", "b"}


@quick
@given(answer=answers, raised=st.one_of(st.none(), st.sampled_from(RAISED)), late=st.booleans())
def test_whatever_a_policy_does_a_request_is_placed(
    answer: object, raised: Callable[[], BaseException] | None, late: bool
) -> None:
    metrics, active = CallLog(), Active(misbehaving(answer, raised, late)())
    guard = PolicyGuard(metrics, Budgets(call_s=60.0, failures=1))
    reasons: list[str] = []
    guard.on_suspend = reasons.append
    placement = guard.place(active, PLACE)
    if isinstance(placement, Place):
        assert placement.instance_id in {"a", "b"} and placement.pull_from in {"", "a", "b"}
        assert all(is_sound(action) for action in placement.also)
    else:
        assert isinstance(placement.reason, str) and metrics.failures == []
    failures = len(metrics.failures)
    assert not failures or placement == Place("b")
    for question in QUESTIONS:
        decided = guard.ask(active, question)
        failures += decided is None
        assert all(is_sound(action) for action in decided or ())
    assert len(metrics.failures) == len(reasons) == failures
    if raised is not None and not late:
        assert failures == len(METHODS)
    # What is recorded and shown of it is one short line.
    assert all("\n" not in reason and len(reason) < 1_000 for reason in reasons)
    assert all(reason.isprintable() for reason in reasons)


@quick
@given(answer=answers, raised=st.one_of(st.none(), st.sampled_from(RAISED)), late=st.booleans())
def test_a_shadow_with_a_mistake_is_compared_and_has_no_effect(
    answer: object, raised: Callable[[], BaseException] | None, late: bool
) -> None:
    shadow = Shadow(PolicyRecord(name="least_loaded"), Slo(), lambda compared: None)
    shadow.active.policy = misbehaving(answer, raised, late)()
    shadow.answered("p", PLACE, Place("a"))
    for question in QUESTIONS:
        shadow.answered("p", question, ())
    assert sum(shadow.counts.values()) == len(METHODS)


@quick
@given(
    field=st.sampled_from(sorted(Declared.__dataclass_fields__)),
    value=junk,
    raised=st.one_of(st.none(), st.sampled_from(RAISED)),
)
def test_attributes_are_read_once_and_checked(
    field: str, value: object, raised: Callable[[], BaseException] | None
) -> None:
    def read(self: object) -> object:
        if raised is not None:
            raise raised()
        return value

    policy = type("Declaring", (LeastLoaded,), {field: property(read)})()
    try:
        found = declared("declaring", policy)
    except UnusablePolicyError as error:
        assert "'declaring'" in str(error)
    else:
        assert raised is None and getattr(found, field) == value


class Agreeable(str):
    """A text that equals everything, and counts how often it is compared."""

    compared: ClassVar[list[object]] = []

    def __eq__(self, other: object) -> bool:
        self.compared.append(other)
        return True

    def __ne__(self, other: object) -> bool:
        self.compared.append(other)
        return False

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "placement",
    [
        Place(Agreeable("a")),
        Place("a", pull_from=Agreeable("nobody")),
        Place("a", also=Agreeable("x")),  # type: ignore[arg-type]
        Place("a", also=(Migrate(Agreeable("r"), "a", "b", "x"),)),
        Place("a", also=(Migrate("r", Agreeable("a"), "b", "x"),)),
    ],
)
def test_objects_of_a_policy_are_not_compared(placement: Place) -> None:
    """Whatever passed would run the policy's code later, where nobody guards it."""

    class Sly(LeastLoaded):
        def place(self, view: Any, arrival: Any, now: float) -> Any:
            return placement

    Agreeable.compared.clear()
    with pytest.raises(BadAnswer):
        ask(Sly(), PLACE)
    assert Agreeable.compared == []


def test_actions_belong_to_the_policy_that_was_asked() -> None:
    """Also where the call is the last one before another policy decides."""
    submitted: list[tuple[str, Any]] = []

    class Executor:
        def submit(self, actions: Any, policy: str, when_full: Any = None) -> None:
            submitted.append((policy, when_full))

    active = ActivePolicy(PolicyRecord(name="pascal"))
    asked = (active.name, active.declared.when_full)

    class Suspending(PlainCalls):
        def ask(self, policy: Any, question: Any) -> Any:
            active.follow(PolicyRecord(name="pascal", suspended="late"), Slo())
            return (Migrate("r", "a", "b", "x"),)

    runner = PolicyRunner(Model(), active, Executor(), Suspending())
    runner.request_changed(DecisionPoint.REASONING_ENDED, REQUEST, Moment(0.0, 0.0))
    assert submitted == [asked]


def test_the_requests_of_actions_are_checked_without_their_views() -> None:
    """A tick that moves requests of many instances would make the views of all their requests."""

    class Reported(RequestTable):
        ids = ("r",)

        def make_views(self) -> tuple[RequestView, ...]:
            raise AssertionError

    view = cluster(replace(instance("a"), requests=Reported()), instance("b"))
    moves = (Migrate("r", "a", "b", "x"),)
    assert checked_actions(view, None, moves) == moves
    with pytest.raises(BadAnswer, match="'gone' is not a request on a"):
        checked_actions(view, None, (Migrate("gone", "a", "b", "x"),))


def test_endless_actions_are_cut_off() -> None:
    class Endless(LeastLoaded):
        def on_tick(self, view: Any, now: float) -> Any:
            return itertools.repeat(Migrate("r", "a", "b", "x"))

    with pytest.raises(BadAnswer, match=f"more than {ACTIONS_MAX:,} actions"):
        ask(Endless(), QUESTIONS[-1])


def test_a_run_that_must_not_guess_ends_at_a_bad_answer() -> None:
    class Forgetful(LeastLoaded):
        def place(self, view: Any, arrival: Any, now: float) -> Any:
            return None

    with pytest.raises(PolicyFailed, match="policy Forgetful at place: returned NoneType instead of Place"):
        PlainCalls().place(Active(Forgetful()), PLACE)

    class Interrupted(LeastLoaded):
        def on_tick(self, view: Any, now: float) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PlainCalls().ask(Active(Interrupted()), QUESTIONS[-1])


class Flaky(LeastLoaded):
    """Fails as told."""

    fails = True

    def on_tick(self, view: Any, now: float) -> Sequence[Action]:
        if self.fails:
            raise ValueError("out of luck")
        return ()


def test_failures_in_a_row_at_one_point_suspend() -> None:
    policy, reasons = Flaky(), list[str]()
    # However long an answer takes.
    guard, active = PolicyGuard(CallLog(), Budgets(call_s=math.inf, failures=3)), Active(policy)
    guard.on_suspend = reasons.append
    tick = QUESTIONS[-1]
    for fails in (True, True, False, True, True):
        policy.fails = fails
        guard.ask(active, tick)
        # An answer at another point does not count.
        guard.place(active, PLACE)
    assert reasons == []
    guard.ask(active, tick)
    (reason,) = reasons
    assert reason.startswith("tick: raised ValueError: out of luck (test_guard.py:")
    assert reason.endswith(", 3 times in a row")
    # Another policy starts anew.
    guard.ask(Active(Flaky()), tick)
    assert len(reasons) == 1


class Clock:
    """Replace the guard's clock."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("waits", "suspended"), [(False, True), (True, False)])
def test_late_answers_suspend_unless_the_machine_was_busy(
    waits: bool, suspended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, metrics, reasons = Clock(), CallLog(), list[str]()

    class Slow(LeastLoaded):
        tick_interval_s = 1.0

        def place(self, view: Any, arrival: Any, now: float) -> Any:
            clock.now_s += 0.06
            clock.waited_s += 0.02 if waits else 0.0
            return Place("a")

        def on_tick(self, view: Any, now: float) -> Sequence[Action]:
            # A tick may take half of its interval.
            clock.now_s += 0.4
            return ()

    monkeypatch.setattr("tailrace.control.guard.time", clock)
    guard, active = PolicyGuard(metrics, Budgets(failures=3), lambda: clock.waited_s), Active(Slow())
    guard.on_suspend = reasons.append
    for _ in range(3):
        # A late answer is used.
        assert guard.place(active, PLACE) == Place("a")
        guard.ask(active, QUESTIONS[-1])
    assert bool(reasons) is suspended
    assert reasons in ([], ["place: took 60 ms; its budget is 50 ms, 3 times in a row"])
    # The first one may be the machine's fault: it is not counted.
    assert len(metrics.failures) == (2 if suspended else 0)


def test_one_call_that_its_watcher_calls_late_suspends() -> None:
    reasons: list[str] = []

    class Late(LeastLoaded):
        def place(self, view: Any, arrival: Any, now: float) -> Any:
            guard.stuck = guard.call
            return Place("a")

    guard, active = PolicyGuard(CallLog(), Budgets(call_s=0.0)), Active(Late())
    guard.on_suspend = reasons.append
    guard.place(active, PLACE)
    assert len(reasons) == 1 and guard.call is None


def test_a_suspended_policy_lets_least_loaded_decide_until_one_is_set() -> None:
    active = ActivePolicy(PolicyRecord(name="arrow"))
    assert active.declared.tick_interval_s is not None
    active.follow(PolicyRecord(name="arrow", suspended="why"), Slo())
    assert (active.name, active.record.name, active.record.suspended) == ("least_loaded", "arrow", "why")
    assert type(active.policy) is LeastLoaded and active.declared.tick_interval_s is None
    active.follow(PolicyRecord(name="arrow"), Slo())
    assert active.name == "arrow" and type(active.policy) is not LeastLoaded
    # What cannot be loaded can still be suspended.
    active.follow(PolicyRecord(name="uninstalled", suspended="why"), Slo())
    assert active.name == "least_loaded"


def test_a_suspended_shadow_is_not_asked() -> None:
    shadow = Shadow(
        PolicyRecord(name="least_loaded"),
        Slo(),
        lambda compared: None,
        PolicyGuard(CallLog(), Budgets(failures=2)),
    )
    shadow.active.policy = Flaky()
    for _ in range(4):
        shadow.answered("p", QUESTIONS[-1], ())
    assert shadow.counts == {(DecisionPoint.TICK, Verdict.FAILED): 2}
    assert "out of luck" in shadow.suspended
    shadow.follow_slo(Slo(ttft_s=1.0))
    assert shadow.suspended


def test_every_question_has_its_point() -> None:
    asked: list[Asked[Any]] = [PLACE, *QUESTIONS]
    assert [question.point for question in asked] == list(DecisionPoint)
    assert all(isinstance(ask(LeastLoaded(), question), (Place, tuple)) for question in asked)
    assert issubclass(LeastLoaded, Policy)
