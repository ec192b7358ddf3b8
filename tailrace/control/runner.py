"""Which policy decides, and how it is asked, on whatever model and clock there is."""

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
from tailrace.intra.base import QUANTUM
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
    """Follows the record in etcd and the deployment's SLOs; without a record, the default given at start."""

    def __init__(self, default: PolicyRecord, slo: Slo | None = None) -> None:
        """Raises UnknownPolicyError, UnusablePolicyError, ParameterError."""
        self.slo = slo or Slo()
        self.record = self.default = default
        self.policy: Policy = load(default.name, parameters=default.parameters, slo=self.slo)
        # All parameters that are in force, those of the batch order included.
        self.values: Mapping[str, Value] = all_parameters(default.name, default.parameters)
        self._refused: PolicyRecord | None = None

    @property
    def name(self) -> str:
        """Of the policy."""
        return self.record.name

    @property
    def admission(self) -> TtftAdmission | None:
        """Which requests are refused, by what was measured of their instances; None: none is."""
        return TtftAdmission.of(self.slo)

    @property
    def quantum_tokens(self) -> int:
        """The quantum by which the policy counts fresh answers; the usual one if it has none."""
        return int(self.values.get(QUANTUM.name, QUANTUM.default))

    def follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by that policy and for those SLOs. A policy that cannot be had leaves the present one in
        force, for the new SLOs."""
        wanted = record or self.default
        if wanted == self._refused:
            # Logged once, not at every change of anything in etcd.
            wanted = self.record
        if not self._can_switch(wanted, slo):
            self._refused = wanted
            self._can_switch(self.record, slo)

    def _can_switch(self, record: PolicyRecord, slo: Slo) -> bool:
        """Switch if that policy can be had; whether it can."""
        try:
            self.switch(record, slo)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            log.error("cannot switch to policy %s, keeping %s: %s", record.name, self.name, error)
            return False
        return True

    def switch(self, record: PolicyRecord, slo: Slo) -> None:
        """Decide by that policy and for those SLOs.

        Raises UnknownPolicyError, UnusablePolicyError, ParameterError; nothing has changed then.
        """
        if (record, slo) == (self.record, self.slo):
            return
        policy = load(record.name, parameters=record.parameters, slo=slo)
        values = all_parameters(record.name, record.parameters)
        log.info("policy %s -> %s; SLO: %s", _words(self.record), _words(record), slo.words())
        if record != self.record:
            self._refused = None
        self.record, self.policy, self.values, self.slo = record, policy, values, slo


def _words(record: PolicyRecord) -> str:
    return " ".join([record.name, *(f"{name}={format_value(v)}" for name, v in record.parameters.items())])


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one holds no placement up for as long as
    its modules take."""
    for name in await asyncio.to_thread(names):
        try:
            await asyncio.to_thread(load, name)
        except (UnknownPolicyError, UnusablePolicyError) as error:
            log.warning("%s", error)


class Point(enum.Enum):
    """The decision points, as metrics and recordings name them."""

    PLACE = "place"
    PREFILL_DONE = "prefill_done"
    REASONING_ENDED = "reasoning_ended"
    LENGTH_BOUNDARY = "length_boundary"
    TICK = "tick"


class Moment(NamedTuple):
    """The same moment by two clocks: the model's, which never goes back, and the policies', which is the time
    of day. In the simulator they are one."""

    model_s: float
    policy_s: float


@dataclass(frozen=True, slots=True)
class PlaceQuestion:
    """Where to prefill."""

    view: ClusterView
    arrival: Arrival
    now_s: float

    def put_to(self, policy: Policy) -> Placement:
        """What the policy decides."""
        return policy.place(self.view, self.arrival, self.now_s)


@dataclass(frozen=True, slots=True)
class Question:
    """Any other decision point; `request` is None at a tick alone."""

    point: Point
    view: ClusterView
    request: RequestView | None
    now_s: float

    def put_to(self, policy: Policy) -> Sequence[Action]:
        """What the policy decides."""
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
    """The part of ClusterModel that a policy is asked on."""

    def view_at(self, now_s: float) -> ClusterView: ...
    def view_for_arrival(self, model: str, now_s: float) -> ClusterView: ...
    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView: ...
    def lengths(self, now_s: float) -> LengthStatistics | None: ...
    def hot_prefixes(self, now_s: float) -> HotPrefixes | None: ...


class Deciding(Protocol):
    """Which policy decides now, and which of its placements are refused as too late."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def admission(self) -> TtftAdmission | None: ...


class Executor(Protocol):
    """Books actions into the model and carries them out."""

    def submit(
        self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE
    ) -> None: ...


class Calls(Protocol):
    """How a policy is called: what happens when it raises, or names what it must not."""

    def place(self, deciding: Deciding, question: PlaceQuestion) -> Placement: ...
    def decide(self, deciding: Deciding, question: Question) -> Sequence[Action] | None:
        """None: it failed."""
        ...


class Watcher(Protocol):
    """Sees each question with the answer to it, before the answer is carried out."""

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None: ...
    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None: ...


class PlainCalls:
    """What a policy raises ends the run."""

    def place(self, deciding: Deciding, question: PlaceQuestion) -> Placement:
        """The policy's placement."""
        return question.put_to(deciding.policy)

    def decide(self, deciding: Deciding, question: Question) -> Sequence[Action] | None:
        """The policy's actions."""
        return question.put_to(deciding.policy)


class PolicyRunner:
    """Decides by whichever policy is in force when it is asked."""

    def __init__(self, model: Model, deciding: Deciding, executor: Executor, calls: Calls) -> None:
        self._model = model
        self._deciding = deciding
        self._executor = executor
        self._calls = calls
        # When the last tick was, and whose.
        self._ticked: tuple[Policy, float] | None = None
        self.watchers: list[Watcher] = []

    def asks(self, point: Point) -> bool:
        """Whether anybody is to be asked there: a point that the policy leaves empty needs no view."""
        if self.watchers:
            return True
        method = _METHODS[point]
        return getattr(type(self._deciding.policy), method) is not getattr(Policy, method)

    def place(self, arrival: Arrival, model: str, at: Moment) -> Placement:
        """Where an arrival for this model (its key; empty: any) goes. The caller books it, then submits what
        goes with it; what goes with a placement that is refused as too late is submitted here."""
        view = self._model.view_for_arrival(model, at.model_s)
        question = PlaceQuestion(view, arrival, at.policy_s)
        placement = self._calls.place(self._deciding, question)
        for watcher in self.watchers:
            watcher.placed(self._deciding.name, question, placement)
        admission = self._deciding.admission
        if admission is None or isinstance(placement, Refuse):
            return placement
        judged = admission.judge(view, arrival, placement)
        if isinstance(judged, Refuse) and placement.also:
            # Such as the pool move that the next request needs.
            self._executor.submit(placement.also, self._deciding.name)
        return judged

    def request_changed(self, point: Point, request: RequestView, at: Moment) -> None:
        """The request has come to this decision point."""
        if self.asks(point):
            view = self._model.view_for_request(request.instance_id, at.model_s)
            self._decide(Question(point, view, request, at.policy_s))

    def tick(self, at: Moment) -> None:
        """One tick. The view tells when this policy's last one was."""
        policy = self._deciding.policy
        last_s = self.last_tick_s
        self._ticked = policy, at.policy_s
        lengths = self._model.lengths(at.model_s)
        hot = self._model.hot_prefixes(at.model_s)
        view = replace(self._model.view_at(at.model_s), last_tick_s=last_s, lengths=lengths, hot=hot)
        self._decide(Question(Point.TICK, view, None, at.policy_s))

    @property
    def last_tick_s(self) -> float | None:
        """When the policy in force was called last, by its clock; None: not by this runner."""
        ticked = self._ticked
        return ticked[1] if ticked is not None and ticked[0] is self._deciding.policy else None

    @last_tick_s.setter
    def last_tick_s(self, now_s: float | None) -> None:
        self._ticked = None if now_s is None else (self._deciding.policy, now_s)

    def _decide(self, question: Question) -> None:
        actions = self._calls.decide(self._deciding, question)
        name = self._deciding.name
        for watcher in self.watchers:
            watcher.decided(name, question, actions)
        if actions:
            self._executor.submit(actions, name, self._deciding.policy.when_full)


class CallMetrics(Protocol):
    """Counts calls of policies."""

    def observe_duration(self, point: Point, seconds: float) -> None: ...
    def failed(self, policy: str, point: Point) -> None: ...


class GuardedCalls:
    """How a live scheduler calls a policy: every request gets a place, whatever the policy does.

    One that fails, or places where it must not, is stood in for.
    """

    def __init__(self, metrics: CallMetrics) -> None:
        self._metrics = metrics
        self._stand_in = LeastLoaded()

    def place(self, deciding: Deciding, question: PlaceQuestion) -> Placement:
        """The policy's placement, or that of `least_loaded`."""
        began_s = time.perf_counter()
        try:
            placement = question.put_to(deciding.policy)
        except Exception:
            log.exception("policy %s failed to place; least_loaded stands in", deciding.name)
        else:
            if not isinstance(placement, Place) or may_place(
                question.view, question.arrival, placement.instance_id
            ):
                return placement
            log.error("policy %s placed on %s, which it must not", deciding.name, placement.instance_id)
        finally:
            self._metrics.observe_duration(Point.PLACE, time.perf_counter() - began_s)
        self._metrics.failed(deciding.name, Point.PLACE)
        return question.put_to(self._stand_in)

    def decide(self, deciding: Deciding, question: Question) -> Sequence[Action] | None:
        """The policy's actions; None: it failed."""
        began_s = time.perf_counter()
        try:
            return question.put_to(deciding.policy)
        except Exception:
            log.exception("policy %s failed at %s", deciding.name, question.point.value)
            self._metrics.failed(deciding.name, question.point)
            return None
        finally:
            self._metrics.observe_duration(question.point, time.perf_counter() - began_s)


def may_place(view: ClusterView, arrival: Arrival, instance_id: str) -> bool:
    """Whether the arrival may go to this instance."""
    instance = view.instances.get(instance_id)
    return (
        instance is not None
        and instance.state is InstanceState.ACTIVE
        and instance_id not in arrival.excluded
    )
