"""Which policy is in force, and how it is called, independent of model and clock."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tailrace.actions import Action, Migrate, Offer, Place, Placement, Refuse, ReturnPrompts, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.control.admission import TtftAdmission
from tailrace.control.answers import BadAnswer, checked_actions, checked_placement
from tailrace.control.cluster_model import ClusterModel
from tailrace.plugins import describe_error
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import (
    Declared,
    UnknownPolicyError,
    UnusablePolicyError,
    all_parameters,
    declared,
    load,
    names,
    problem_of,
)
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ActivePolicy:
    """Follow the policy record in etcd and the deployment's SLOs; without a record, the default given at
    start."""

    def __init__(self, default: PolicyRecord, slo: Slo | None = None) -> None:
        """Load the default. Raise UnknownPolicyError, UnusablePolicyError or ParameterError."""
        self.slo = slo or Slo()
        self.record = self.default = default
        self.policy = _load(default, self.slo)
        # All parameters in force, including those of the batch order.
        self.values: Mapping[str, Value] = all_parameters(default.name, default.parameters)
        self._refused: PolicyRecord | None = None

    @property
    def policy(self) -> Policy:
        """Return the policy that decides."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self.declared = policy, declared(self.record.name, policy)

    @property
    def name(self) -> str:
        """Return the name of the policy that decides: `least_loaded` while the one that was set is
        suspended."""
        return FALLBACK if self.record.suspended else self.record.name

    @property
    def admission(self) -> TtftAdmission | None:
        """Return the rule by which requests are refused as too late; None if none is refused."""
        return TtftAdmission.of(self.slo)

    def follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by this policy and for these SLOs. If the policy cannot be loaded, the present one continues
        with the SLOs."""
        requested = record or self.default
        if requested == self._refused:
            # Refused before: logged once, not at every change in etcd.
            requested = self.record
        if not self._try_switch(requested, slo):
            self._refused = requested
            self._try_switch(self.record, slo)

    def _try_switch(self, record: PolicyRecord, slo: Slo) -> bool:
        """Switch if the policy can be loaded; return whether it could."""
        try:
            self.switch(record, slo)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            log.error("cannot switch to policy %s, keeping %s: %s", record.name, self.name, error)
            return False
        return True

    def switch(self, record: PolicyRecord, slo: Slo) -> None:
        """Decide by this policy and for these SLOs.

        Raise UnknownPolicyError, UnusablePolicyError or ParameterError; then nothing has changed.
        """
        if (record, slo) == (self.record, self.slo):
            return
        policy = _load(record, slo)
        # Those of a suspended policy's batch order, which the workers keep.
        values = self.values
        if not record.suspended:
            values = all_parameters(record.name, record.parameters)
        log.info(
            "policy %s -> %s; SLO: %s", _format_record(self.record), _format_record(record), slo.describe()
        )
        if record != self.record:
            self._refused = None
        self.policy = policy
        self.record, self.values, self.slo = record, values, slo


FALLBACK: Final = "least_loaded"
"""The policy that decides where another one failed, or is suspended."""


def _load(record: PolicyRecord, slo: Slo) -> Policy:
    """Create the policy that decides for this record. Raise as `load` does."""
    return LeastLoaded() if record.suspended else load(record.name, parameters=record.parameters, slo=slo)


def _format_record(record: PolicyRecord) -> str:
    values = [f"{name}={format_value(value)}" for name, value in record.parameters.items()]
    suspended = [f"(suspended: {record.suspended})"] if record.suspended else []
    return " ".join([record.name, *values, *suspended])


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one does not delay placements by its
    import."""
    for name in await asyncio.to_thread(names):
        if problem := await asyncio.to_thread(problem_of, name):
            log.warning("%s", problem)


class Point(enum.Enum):
    """The decision points, as named in metrics and recordings."""

    PLACE = "place"
    PREFILL_DONE = "prefill_done"
    REASONING_ENDED = "reasoning_ended"
    LENGTH_BOUNDARY = "length_boundary"
    TICK = "tick"


class Moment(NamedTuple):
    """One moment on two clocks: the model's, which is monotonic, and the policies', which is the time of day.

    In the simulator both are the simulated clock.
    """

    model_s: float
    policy_s: float


@dataclass(frozen=True, slots=True)
class PlaceQuestion:
    """The question where to prefill an arrival."""

    view: ClusterView
    arrival: Arrival
    now_s: float

    @property
    def point(self) -> Point:
        """Return the decision point."""
        return Point.PLACE

    def put_to(self, policy: Policy) -> Placement:
        """Return the policy's placement, checked. Raise BadAnswer, or what the policy raises."""
        answer = policy.place(self.view, self.arrival, self.now_s)
        placement = checked_placement(self.view, self.arrival, answer)
        if policy.moves or isinstance(placement, Refuse) or not placement.also:
            return placement
        return Place(placement.instance_id, without_moves(placement.also), placement.pull_from)


@dataclass(frozen=True, slots=True)
class Question:
    """The question at any other decision point; `request` is None at ticks only."""

    point: Point
    view: ClusterView
    request: RequestView | None
    now_s: float

    def put_to(self, policy: Policy) -> tuple[Action, ...]:
        """Return the policy's actions, all of them made and checked. Raise BadAnswer, or what the policy
        raises."""
        actions = checked_actions(self.view, self.request, self._call(policy))
        return actions if policy.moves else without_moves(actions)

    def _call(self, policy: Policy) -> object:
        request = self.request
        if request is None:
            return policy.on_tick(self.view, self.now_s)
        match self.point:
            case Point.PREFILL_DONE:
                return policy.on_prefill_done(self.view, request, self.now_s)
            case Point.REASONING_ENDED:
                return policy.on_reasoning_ended(self.view, request, self.now_s)
            case _:
                return policy.on_length_boundary(self.view, request, self.now_s)


def without_moves(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a policy that is to move no request, without its moves."""
    return tuple(action for action in actions if not isinstance(action, (Migrate, Offer, ReturnPrompts)))


class Asked(Protocol[T_co]):
    """A question to a policy (PlaceQuestion or Question)."""

    @property
    def point(self) -> Point: ...
    def put_to(self, policy: Policy) -> T_co: ...


def ask(policy: Policy, question: Asked[T]) -> T:
    """Return the policy's answer, checked. Every policy, in force or not, is asked here.

    What passes the checks (answers.py) is of the exact types that were asked for, all of it made, at most
    10,000 actions, and names only instances and requests that the policy was shown.

    Raise BadAnswer and nothing else: what a policy raises, even SystemExit, KeyboardInterrupt or
    CancelledError, is no reason to end what asks it.
    """
    try:
        return question.put_to(policy)
    except BadAnswer:
        raise
    except BaseException as error:
        raise BadAnswer(f"raised {describe_error(error)}") from error


_METHODS: Final = {
    Point.PREFILL_DONE: "on_prefill_done",
    Point.REASONING_ENDED: "on_reasoning_ended",
    Point.LENGTH_BOUNDARY: "on_length_boundary",
    Point.TICK: "on_tick",
}


class PolicyInForce(Protocol):
    """The policy that decides now, and the rule by which its placements are refused as too late."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def declared(self) -> Declared: ...
    @property
    def admission(self) -> TtftAdmission | None: ...


class Executor(Protocol):
    """Enter actions into the model and carry them out."""

    def submit(
        self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE
    ) -> None: ...


class Calls(Protocol):
    """Ask a policy; decides what happens if its answer is bad."""

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement: ...
    def ask(self, policy_in_force: PolicyInForce, question: Question) -> Sequence[Action] | None:
        """Return the policy's actions; None if it failed."""
        ...


class Watcher(Protocol):
    """See each question with its answer before the answer is carried out."""

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None: ...
    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None: ...


class PlainCalls:
    """Ask the policy, and end the run at a bad answer: what it would be replaced by is no result of this
    policy."""

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement. Raise PolicyFailed."""
        return self.ask(policy_in_force, question)

    def ask(self, policy_in_force: PolicyInForce, question: Asked[T]) -> T:
        """Return the policy's answer. Raise PolicyFailed."""
        try:
            return ask(policy_in_force.policy, question)
        except BadAnswer as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                # Ctrl-C, since this process runs in a terminal.
                raise error.__cause__ from None
            name, point = policy_in_force.name, question.point.value
            raise PolicyFailed(f"policy {name} at {point}: {error}") from error


class PolicyFailed(RuntimeError):
    """A policy gave a bad answer in a run that can only end then; the message names both."""


class PolicyRunner:
    """Ask whichever policy is in force at each decision point."""

    def __init__(
        self, model: ClusterModel[Any], policy_in_force: PolicyInForce, executor: Executor, calls: Calls
    ) -> None:
        self._model = model
        self._policy_in_force = policy_in_force
        self._executor = executor
        self._calls = calls
        # The policy and time of the last tick.
        self._last_tick: tuple[Policy, float] | None = None
        self.watchers: list[Watcher] = []

    def has_handler(self, point: Point) -> bool:
        """Return whether the policy or a watcher handles this point; if not, no view is needed."""
        if self.watchers:
            return True
        method = _METHODS[point]
        return getattr(type(self._policy_in_force.policy), method) is not getattr(Policy, method)

    def place(self, arrival: Arrival, at: Moment) -> Placement:
        """Return where an arrival goes.

        The caller enters the placement into the model, then submits its additional actions. Those of a
        placement that is refused as too late are submitted here.
        """
        view = self._model.view_for_arrival(arrival.model, at.model_s)
        question = PlaceQuestion(view, arrival, at.policy_s)
        name = self._policy_in_force.name
        placement = self._calls.place(self._policy_in_force, question)
        for watcher in self.watchers:
            watcher.placed(name, question, placement)
        admission = self._policy_in_force.admission
        if admission is None or isinstance(placement, Refuse):
            return placement
        evaluated = admission.evaluate(view, arrival, placement)
        if isinstance(evaluated, Refuse) and placement.also:
            # For instance the pool move that the next request needs.
            self._executor.submit(placement.also, name)
        return evaluated

    def request_changed(self, point: Point, request: RequestView, at: Moment) -> None:
        """Ask the policy about a request that has reached this decision point."""
        if self.has_handler(point):
            view = self._model.view_for_request(request.instance_id, at.model_s)
            self._decide(Question(point, view, request, at.policy_s))

    def tick(self, at: Moment) -> None:
        """Run one tick. The view contains the time of the policy's previous one."""
        policy = self._policy_in_force.policy
        last_s = self.last_tick_s
        self._last_tick = policy, at.policy_s
        lengths = self._model.lengths(at.model_s)
        hot = self._model.hot_prefixes(at.model_s)
        view = replace(self._model.view_at(at.model_s), last_tick_s=last_s, lengths=lengths, hot=hot)
        self._decide(Question(Point.TICK, view, None, at.policy_s))

    @property
    def last_tick_s(self) -> float | None:
        """Return when this runner last ticked the policy in force, by the policy's clock; None if never."""
        ticked = self._last_tick
        return ticked[1] if ticked is not None and ticked[0] is self._policy_in_force.policy else None

    @last_tick_s.setter
    def last_tick_s(self, now_s: float | None) -> None:
        self._last_tick = None if now_s is None else (self._policy_in_force.policy, now_s)

    def _decide(self, question: Question) -> None:
        # Before the call, which may be the one that suspends this policy.
        name, when_full = self._policy_in_force.name, self._policy_in_force.declared.when_full
        actions = self._calls.ask(self._policy_in_force, question)
        for watcher in self.watchers:
            watcher.decided(name, question, actions)
        if actions:
            self._executor.submit(actions, name, when_full)


class CallMetrics(Protocol):
    """Count calls of policies."""

    def observe_duration(self, point: Point, seconds: float) -> None: ...
    def failed(self, policy: str, point: Point, why: str) -> None:
        """Count and log a bad answer, or one that came too late."""
        ...


class LoggedOnce:
    """Count nothing, and log the first bad answer of a policy at each decision point."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, Point]] = set()

    def observe_duration(self, point: Point, seconds: float) -> None:
        """Ignore durations."""

    def failed(self, policy: str, point: Point, why: str) -> None:
        """Log the first one."""
        if (policy, point) not in self._logged:
            self._logged.add((policy, point))
            log.warning("policy %s at %s: %s", policy, point.value, why)


@dataclass(frozen=True, slots=True)
class Budgets:
    """When a policy is suspended."""

    # Seconds for a placement, and for any other question about one request.
    call_s: float = 0.05
    # For a tick, as a share of the policy's interval.
    tick_share: float = 0.5
    # How many answers in a row at one decision point may be bad or late.
    failures: int = 5


DEFAULT_BUDGETS: Final = Budgets()


class Call(NamedTuple):
    """A call of a policy's code in progress, for whoever watches that it ends."""

    # The policy that was asked, or the record of the one that is being loaded.
    of: PolicyInForce | PolicyRecord
    # The decision point, or "load".
    what: str


class Guard:
    """Ask a policy in a live scheduler, where every request needs a placement whatever the policy does.

    `least_loaded` places instead of a policy that gives a bad answer; elsewhere nothing is done. After some
    such answers in a row `on_suspend` is called with the reason: then `least_loaded` decides, here at once
    and through etcd everywhere, until somebody sets a policy (scheduler_svc/following.py).

    A late answer is used. It counts as bad only if the one before was late or bad, too, and if it is late
    without the time in which this thread waited for a core: on a busy machine one call in thousands takes
    longer than any budget, and no policy is to blame. A call that takes more than a second, or does not
    return at all, is found by another thread: the policy is suspended when the call returns, and after three
    seconds the process runs again without it (`Following.watched_calls`).
    """

    def __init__(
        self,
        metrics: CallMetrics,
        budgets: Budgets = DEFAULT_BUDGETS,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`waited_s`: returns for how many seconds this thread has been ready to run, but did not."""
        self._metrics = metrics
        self._budgets = budgets
        self._waited_s = waited_s
        self._fallback = LeastLoaded()
        # Bad answers in a row of this policy, by point; those with none are absent.
        self._policy: Policy | None = None
        self._in_a_row: dict[Point, int] = {}
        self.on_suspend: Callable[[str], None] = lambda why: None
        # The call in progress, and the one that its watcher found to be much too late.
        self.call: Call | None = None
        self.stuck: Call | None = None

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement, or that of `least_loaded`."""
        placement = self.ask(policy_in_force, question)
        return ask(self._fallback, question) if placement is None else placement

    def another(self) -> Guard:
        """Return a guard with the same budgets for a policy that decides nothing."""
        return Guard(LoggedOnce(), self._budgets, self._waited_s)

    @contextmanager
    def loading(self, record: PolicyRecord) -> Iterator[None]:
        """Show the watcher that a policy is loaded during the block."""
        self.call = Call(record, "load")
        try:
            yield
        finally:
            self.call = None

    def ask(self, policy_in_force: PolicyInForce, question: Asked[T]) -> T | None:
        """Return the policy's answer; None if it is bad."""
        policy, point = policy_in_force.policy, question.point
        if policy is not self._policy:
            self._policy = policy
            self._in_a_row.clear()
        in_a_row = self._in_a_row.get(point, 0)
        waited_s = self._waited_s() if in_a_row else 0.0
        call = self.call = Call(policy_in_force, point.value)
        answer: T | None = None
        why = ""
        began_s = time.perf_counter()
        try:
            answer = ask(policy, question)
        except BadAnswer as error:
            why = str(error)
        took_s = time.perf_counter() - began_s
        self.call = None
        self._metrics.observe_duration(point, took_s)
        if not why:
            budget_s = self._budget_s(policy_in_force, point)
            if in_a_row and took_s > budget_s:
                took_s -= self._waited_s() - waited_s
            if took_s <= budget_s:
                if in_a_row:
                    del self._in_a_row[point]
                return answer
            why = f"took {took_s * 1e3:.0f} ms; its budget is {budget_s * 1e3:g} ms"
            if not in_a_row and call is not self.stuck:
                # Watched more closely from now on.
                self._in_a_row[point] = 1
                return answer
        self._in_a_row[point] = in_a_row + 1
        self._metrics.failed(policy_in_force.name, point, why)
        if in_a_row + 1 >= self._budgets.failures or call is self.stuck:
            times = f", {in_a_row + 1} times in a row" if in_a_row else ""
            self.on_suspend(f"{point.value}: {why}{times}")
        return answer

    def _budget_s(self, policy_in_force: PolicyInForce, point: Point) -> float:
        interval_s = policy_in_force.declared.tick_interval_s if point is Point.TICK else None
        return self._budgets.call_s if interval_s is None else interval_s * self._budgets.tick_share


def patient_guard() -> Guard:
    """Return a guard that suspends no policy, and counts nothing: a replay must not depend on the machine's
    speed."""
    return Guard(LoggedOnce(), Budgets(math.inf, math.inf, sys.maxsize))
