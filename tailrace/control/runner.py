"""How the policy in force is asked, independent of model and clock.

`PolicyRunner` makes the view and the question, and submits what was decided. `ask` calls the policy and
checks its answer. In between, a `Calls` decides what becomes of a bad or late one: guard.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tailrace.actions import Action, Migrate, Offer, Place, Placement, Refuse, ReturnPrompts, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.control.admission import TtftAdmission
from tailrace.control.answers import Answer, BadAnswer, checked_actions, checked_placement
from tailrace.control.cluster_model import ClusterModel
from tailrace.plugins import describe_error
from tailrace.policy.base import Policy
from tailrace.policy.registry import Declared

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DecisionPoint(enum.Enum):
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


_METHODS: Final = {
    DecisionPoint.PREFILL_DONE: "on_prefill_done",
    DecisionPoint.REASONING_ENDED: "on_reasoning_ended",
    DecisionPoint.LENGTH_BOUNDARY: "on_length_boundary",
    DecisionPoint.TICK: "on_tick",
}


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
            watcher.answered(name, question, placement)
        admission = self._policy_in_force.admission
        if admission is None or isinstance(placement, Refuse) or self._model.is_out_of_date(at.model_s):
            return placement
        evaluated = admission.evaluate(view, arrival, placement)
        if isinstance(evaluated, Refuse) and placement.also:
            # For instance the pool move that the next request needs.
            self._executor.submit(placement.also, name)
        return evaluated

    def request_changed(self, point: DecisionPoint, request: RequestView, at: Moment) -> None:
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
        self._decide(Question(DecisionPoint.TICK, view, None, at.policy_s))

    def _decide(self, question: Question) -> None:
        # Before the call, which may be the one that suspends this policy.
        name, when_full = self._policy_in_force.name, self._policy_in_force.declared.when_full
        actions = self._calls.ask(self._policy_in_force, question)
        for watcher in self.watchers:
            watcher.answered(name, question, actions)
        if actions:
            self._executor.submit(actions, name, when_full)

    def has_handler(self, point: DecisionPoint) -> bool:
        """Return whether the policy or a watcher handles this point; if not, no view is needed."""
        if self.watchers:
            return True
        method = _METHODS[point]
        return getattr(type(self._policy_in_force.policy), method) is not getattr(Policy, method)

    @property
    def last_tick_s(self) -> float | None:
        """Return when this runner last ticked the policy in force, by the policy's clock; None if never."""
        ticked = self._last_tick
        return ticked[1] if ticked is not None and ticked[0] is self._policy_in_force.policy else None

    @last_tick_s.setter
    def last_tick_s(self, now_s: float | None) -> None:
        self._last_tick = None if now_s is None else (self._policy_in_force.policy, now_s)


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
    """Put a question to a policy by `ask`, and decide what becomes of a bad or late answer.

    In a scheduler that is `PolicyGuard`: a late answer is used. Instead of a bad placement, that of
    `least_loaded` is; instead of other bad actions, none are. After a few in a row the policy is suspended.
    """

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement, or another one if it failed."""
        ...

    def ask(self, policy_in_force: PolicyInForce, question: Question) -> Sequence[Action] | None:
        """Return the policy's actions; None if it failed."""
        ...


class Watcher(Protocol):
    """See each question with its answer before the answer is carried out."""

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None: ...


@dataclass(frozen=True, slots=True)
class PlaceQuestion:
    """The question where to prefill an arrival."""

    view: ClusterView
    arrival: Arrival
    now_s: float

    @property
    def point(self) -> DecisionPoint:
        """Return the decision point."""
        return DecisionPoint.PLACE

    @property
    def request_id(self) -> str:
        """Return the request."""
        return self.arrival.request_id

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

    point: DecisionPoint
    view: ClusterView
    request: RequestView | None
    now_s: float

    @property
    def request_id(self) -> str:
        """Return the request; empty at ticks."""
        return "" if self.request is None else self.request.request_id

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
            case DecisionPoint.PREFILL_DONE:
                return policy.on_prefill_done(self.view, request, self.now_s)
            case DecisionPoint.REASONING_ENDED:
                return policy.on_reasoning_ended(self.view, request, self.now_s)
            case _:
                return policy.on_length_boundary(self.view, request, self.now_s)


def without_moves(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a policy that is to move no request, without its moves."""
    return tuple(action for action in actions if not isinstance(action, (Migrate, Offer, ReturnPrompts)))


class Asked(Protocol[T_co]):
    """A question to a policy (PlaceQuestion or Question)."""

    @property
    def point(self) -> DecisionPoint: ...
    @property
    def request_id(self) -> str: ...
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
