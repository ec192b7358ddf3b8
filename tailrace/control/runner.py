"""Which policy is in force, and how it is called, independent of model and clock."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from tailrace.actions import Action, Place, Placement, Refuse, WhenFull
from tailrace.cluster import Arrival, ClusterView, HotPrefixes, InstanceState, RequestView
from tailrace.control.admission import TtftAdmission
from tailrace.lengths import LengthStatistics
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import (
    UnknownPolicyError,
    UnusablePolicyError,
    all_parameters,
    load,
    names,
)
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)


class ActivePolicy:
    """Follow the policy record in etcd and the deployment's SLOs; without a record, the default given at
    start."""

    def __init__(self, default: PolicyRecord, slo: Slo | None = None) -> None:
        """Load the default. Raise UnknownPolicyError, UnusablePolicyError or ParameterError."""
        self.slo = slo or Slo()
        self.record = self.default = default
        self.policy: Policy = load(default.name, parameters=default.parameters, slo=self.slo)
        # All parameters in force, including those of the batch order.
        self.values: Mapping[str, Value] = all_parameters(default.name, default.parameters)
        self._refused: PolicyRecord | None = None

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return self.record.name

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
        policy = load(record.name, parameters=record.parameters, slo=slo)
        values = all_parameters(record.name, record.parameters)
        log.info(
            "policy %s -> %s; SLO: %s", _format_record(self.record), _format_record(record), slo.describe()
        )
        if record != self.record:
            self._refused = None
        self.record, self.policy, self.values, self.slo = record, policy, values, slo


def _format_record(record: PolicyRecord) -> str:
    return " ".join([record.name, *(f"{name}={format_value(v)}" for name, v in record.parameters.items())])


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one does not delay placements by its
    import."""
    for name in await asyncio.to_thread(names):
        try:
            await asyncio.to_thread(load, name)
        except (UnknownPolicyError, UnusablePolicyError) as error:
            log.warning("%s", error)


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

    def ask(self, policy: Policy) -> Placement:
        """Return the policy's placement."""
        return policy.place(self.view, self.arrival, self.now_s)


@dataclass(frozen=True, slots=True)
class Question:
    """The question at any other decision point; `request` is None at ticks only."""

    point: Point
    view: ClusterView
    request: RequestView | None
    now_s: float

    def ask(self, policy: Policy) -> Sequence[Action]:
        """Return the policy's actions."""
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


_METHODS: Final = {
    Point.PREFILL_DONE: "on_prefill_done",
    Point.REASONING_ENDED: "on_reasoning_ended",
    Point.LENGTH_BOUNDARY: "on_length_boundary",
    Point.TICK: "on_tick",
}


class Model(Protocol):
    """The cluster model (the used part of ClusterModel)."""

    def view_at(self, now_s: float) -> ClusterView: ...
    def view_for_arrival(self, model: str, now_s: float) -> ClusterView: ...
    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView: ...
    def lengths(self, now_s: float) -> LengthStatistics | None: ...
    def hot_prefixes(self, now_s: float) -> HotPrefixes | None: ...


class PolicyInForce(Protocol):
    """The policy that decides now, and the rule by which its placements are refused as too late."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def admission(self) -> TtftAdmission | None: ...


class Executor(Protocol):
    """Enter actions into the model and carry them out."""

    def submit(
        self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE
    ) -> None: ...


class Calls(Protocol):
    """Call a policy; decides what happens if it raises, or chooses an instance that it must not use."""

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement: ...
    def decide(self, policy_in_force: PolicyInForce, question: Question) -> Sequence[Action] | None:
        """Return the policy's actions; None if it failed."""
        ...


class Watcher(Protocol):
    """See each question with its answer before the answer is carried out."""

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None: ...
    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None: ...


class PlainCalls:
    """Call the policy directly: an exception ends the run."""

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement."""
        return question.ask(policy_in_force.policy)

    def decide(self, policy_in_force: PolicyInForce, question: Question) -> Sequence[Action] | None:
        """Return the policy's actions."""
        return question.ask(policy_in_force.policy)


class PolicyRunner:
    """Ask whichever policy is in force at each decision point."""

    def __init__(
        self, model: Model, policy_in_force: PolicyInForce, executor: Executor, calls: Calls
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

    def place(self, arrival: Arrival, model: str, at: Moment) -> Placement:
        """Return where an arrival for this model (its key; empty: any) goes.

        The caller enters the placement into the model, then submits its additional actions. Those of a
        placement that is refused as too late are submitted here.
        """
        view = self._model.view_for_arrival(model, at.model_s)
        question = PlaceQuestion(view, arrival, at.policy_s)
        placement = self._calls.place(self._policy_in_force, question)
        for watcher in self.watchers:
            watcher.placed(self._policy_in_force.name, question, placement)
        admission = self._policy_in_force.admission
        if admission is None or isinstance(placement, Refuse):
            return placement
        evaluated = admission.evaluate(view, arrival, placement)
        if isinstance(evaluated, Refuse) and placement.also:
            # For instance the pool move that the next request needs.
            self._executor.submit(placement.also, self._policy_in_force.name)
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
        actions = self._calls.decide(self._policy_in_force, question)
        name = self._policy_in_force.name
        for watcher in self.watchers:
            watcher.decided(name, question, actions)
        if actions:
            self._executor.submit(actions, name, self._policy_in_force.policy.when_full)


class CallMetrics(Protocol):
    """Count calls of policies."""

    def observe_duration(self, point: Point, seconds: float) -> None: ...
    def failed(self, policy: str, point: Point) -> None: ...


class GuardedCalls:
    """Call a policy in a live scheduler, where every request needs a placement whatever the policy does.

    If the policy fails, or chooses an instance that it must not use, `least_loaded` decides instead.
    """

    def __init__(self, metrics: CallMetrics) -> None:
        self._metrics = metrics
        self._fallback = LeastLoaded()

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement, or that of `least_loaded`."""
        began_s = time.perf_counter()
        try:
            placement = question.ask(policy_in_force.policy)
        except Exception:
            log.exception("policy %s failed to place; using least_loaded instead", policy_in_force.name)
        else:
            if not isinstance(placement, Place) or may_place(
                question.view, question.arrival, placement.instance_id
            ):
                return placement
            log.error(
                "policy %s chose %s, which may not be used", policy_in_force.name, placement.instance_id
            )
        finally:
            self._metrics.observe_duration(Point.PLACE, time.perf_counter() - began_s)
        self._metrics.failed(policy_in_force.name, Point.PLACE)
        return question.ask(self._fallback)

    def decide(self, policy_in_force: PolicyInForce, question: Question) -> Sequence[Action] | None:
        """Return the policy's actions; None if it failed."""
        began_s = time.perf_counter()
        try:
            return question.ask(policy_in_force.policy)
        except Exception:
            log.exception("policy %s failed at %s", policy_in_force.name, question.point.value)
            self._metrics.failed(policy_in_force.name, question.point)
            return None
        finally:
            self._metrics.observe_duration(question.point, time.perf_counter() - began_s)


def may_place(view: ClusterView, arrival: Arrival, instance_id: str) -> bool:
    """Return whether the arrival may go to this instance."""
    instance = view.instances.get(instance_id)
    return (
        instance is not None
        and instance.state is InstanceState.ACTIVE
        and instance_id not in arrival.excluded
    )
