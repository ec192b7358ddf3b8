"""Replay a recording: feed its inputs to the model, ask the policy again, and compare the decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError

from tailrace.actions import Action, Placement, WhenFull
from tailrace.control.live import LiveControl, read_policy
from tailrace.control.recording import (
    Arrived,
    BrokenOff,
    CacheListed,
    CopyOrdered,
    CopySettled,
    Decided,
    Event,
    InstanceKnown,
    InvalidRecordingError,
    MembersChanged,
    MigrationClosed,
    MigrationOpened,
    PolicyFollowed,
    PoolOrdered,
    PoolSettled,
    RecordingOverflow,
    Reported,
    ReportsStopped,
    Started,
    Ticked,
    TicksForgotten,
    recorded_actions,
    recorded_placement,
)
from tailrace.control.runner import Moment, PlaceQuestion, Point, Question, Watcher, patient_guard
from tailrace.records import PolicyRecord
from tailrace.v1 import cache_pb2, monitor_pb2


@dataclass(frozen=True, slots=True)
class Replayed:
    """One decision as recorded and as replayed; None: there was none then, or now."""

    point: str
    request_id: str
    policy: str
    recorded: msgspec.Raw | None
    replayed: msgspec.Raw | None

    @property
    def same(self) -> bool:
        """Return whether both are equal, byte for byte."""
        return self.recorded == self.replayed

    @property
    def acted(self) -> bool:
        """Return whether either decision was anything but an empty list of actions."""
        return any(answer not in (None, _NO_ACTIONS) for answer in (self.recorded, self.replayed))


_NO_ACTIONS = msgspec.Raw(b"[]")


class _Events:
    """Iterate over the events with one event of look-ahead."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._next: Event | None = None

    def peek(self) -> Event | None:
        if self._next is None:
            self._next = next(self._events, None)
        return self._next

    def pop(self) -> Event | None:
        event, self._next = self.peek(), None
        return event


class Replay:
    """Replay a recording once. The counters are by decision point."""

    def __init__(self, events: Iterator[Event], on_compared: Callable[[Replayed], None]) -> None:
        """`on_compared` is called with each decision as it is compared."""
        self._events = _Events(events)
        self._on_compared = on_compared
        self.decisions: Counter[str] = Counter()
        self.acting: Counter[str] = Counter()
        self.different: Counter[str] = Counter()
        self._policies: dict[str, None] = {}
        # Recorded seconds so far.
        self.seconds = 0.0
        # Why the recording ends early; empty: it does not.
        self.ends_early = ""
        self.control = self._start()

    def _start(self) -> LiveControl:
        started = self._events.pop()
        if started is None:
            raise InvalidRecordingError("empty: nothing was recorded")
        if not isinstance(started, Started):
            raise InvalidRecordingError("line 1: not the start of a recording")
        instances: list[InstanceKnown] = []
        while isinstance(event := self._events.peek(), InstanceKnown):
            instances.append(event)
            self._events.pop()
        self._began_s = started.now_s
        control = LiveControl.restored(started, instances, self, patient_guard())
        control.runner.watchers.append(self)
        return control

    @property
    def policies(self) -> str:
        """Return the names of the policies that decided, in order."""
        return ", ".join(self._policies)

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher that sees every question as well."""
        self.control.runner.watchers.append(watcher)

    def run(self) -> None:
        """Replay to the end. Raise InvalidRecordingError."""
        while (event := self._events.pop()) is not None:
            try:
                self._feed(event)
            except DecodeError as error:
                raise InvalidRecordingError(f"the message in {type(event).__name__}: {error}") from error

    def _feed(self, event: Event) -> None:
        control, model = self.control, self.control.model
        match event:
            case Reported():
                report = monitor_pb2.WorkerReport.FromString(event.report)
                control.reported(report, self._at(event), deciding=event.deciding)
            case Arrived():
                control.arrived(event.incoming, self._at(event))
            case Ticked():
                control.tick(self._at(event))
            case TicksForgotten():
                control.forget_ticks()
            case MembersChanged():
                model.set_members(event.members, event.now_s)
            case PolicyFollowed():
                control.follow(_policy(event), event.slo)
            case ReportsStopped():
                model.set_silent(event.instance_ids)
            case CacheListed():
                model.cache_listed(event.instance_id, cache_pb2.ListCacheReply.FromString(event.reply))
            case MigrationOpened():
                model.migration_opened(event.request, event.target_id)
            case MigrationClosed():
                model.migration_closed(event.request_id)
            case PoolOrdered():
                model.pool_ordered(event.instance_id, event.pool)
            case PoolSettled():
                model.settle_pool(event.instance_id)
            case CopyOrdered():
                model.copy_ordered(event.copy, event.now_s)
            case CopySettled():
                model.copy_settled(event.target_id, event.now_s)
            case Decided():
                # The policy was not asked in the replay.
                self._count(Replayed(event.point, event.request_id, event.policy, event.answer, None))
            case RecordingOverflow():
                self.ends_early = "its reader could not keep up"
            case BrokenOff():
                self.ends_early = "its last line is incomplete, as after a full disk or a killed recorder"
            case Started() | InstanceKnown():
                raise InvalidRecordingError("an instance's state after the beginning")

    def _at(self, event: Reported | Arrived | Ticked) -> Moment:
        self.seconds = event.now_s - self._began_s
        return Moment(event.now_s, event.wall_s)

    # ---- Watcher: called when the policy has decided again

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None:
        """Compare a placement."""
        request_id = question.arrival.request_id
        self._match_recorded(Point.PLACE, request_id, policy, recorded_placement(placement))

    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None:
        """Compare any other decision."""
        request_id = "" if question.request is None else question.request.request_id
        self._match_recorded(question.point, request_id, policy, recorded_actions(actions))

    def _match_recorded(self, point: Point, request_id: str, policy: str, answer: msgspec.Raw) -> None:
        recorded = self._events.peek()
        if recorded is None or isinstance(recorded, (RecordingOverflow, BrokenOff)):
            # The recording ends between an input and the decisions on it.
            return
        then: msgspec.Raw | None = None
        asked = point.value, request_id
        if isinstance(recorded, Decided) and (recorded.point, recorded.request_id) == asked:
            self._events.pop()
            then = recorded.answer
        self._count(Replayed(point.value, request_id, policy, then, answer))

    def _count(self, replayed: Replayed) -> None:
        self._policies[replayed.policy] = None
        self.decisions[replayed.point] += 1
        self.acting[replayed.point] += replayed.acted
        self.different[replayed.point] += not replayed.same
        self._on_compared(replayed)

    # ---- Executor: applies the recorded orders, whatever was decided now

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Feed the orders that were given with the recorded decision."""
        while isinstance(event := self._events.peek(), (MigrationOpened, PoolOrdered, CopyOrdered)):
            self._events.pop()
            self._feed(event)


def _policy(event: PolicyFollowed) -> PolicyRecord | None:
    return None if event.policy is None else read_policy(event.policy)


def points(counts: Iterable[str]) -> list[str]:
    """Return decision points in their order."""
    seen = set(counts)
    return [point.value for point in Point if point.value in seen]
