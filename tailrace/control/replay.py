"""Replay a recording: feed its inputs to the model, ask the policy again, and compare the decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.actions import Action, WhenFull
from tailrace.control.answers import Answer
from tailrace.control.events import Arrived, CopyOrdered, MigrationOpened, PoolOrdered, Reported, Ticked
from tailrace.control.guard import patient_guard
from tailrace.control.live import LiveControl
from tailrace.control.recording import (
    BrokenOff,
    Decided,
    InstanceKnown,
    InvalidRecordingError,
    Line,
    RecordingOverflow,
    Started,
    recorded_answer,
)
from tailrace.control.runner import Asked, DecisionPoint, Watcher


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


class _Lines:
    """Iterate over the lines with one line of look-ahead."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._next: Line | None = None

    def peek(self) -> Line | None:
        if self._next is None:
            self._next = next(self._lines, None)
        return self._next

    def pop(self) -> Line | None:
        line, self._next = self.peek(), None
        return line


class Replay:
    """Replay a recording once. The counters are by decision point."""

    def __init__(self, lines: Iterator[Line], on_compared: Callable[[Replayed], None]) -> None:
        """`on_compared` is called with each decision as it is compared."""
        self._lines = _Lines(lines)
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
        started = self._lines.pop()
        if started is None:
            raise InvalidRecordingError("empty: nothing was recorded")
        if not isinstance(started, Started):
            raise InvalidRecordingError("line 1: not the start of a recording")
        instances: list[InstanceKnown] = []
        while isinstance(event := self._lines.peek(), InstanceKnown):
            instances.append(event)
            self._lines.pop()
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
        while (line := self._lines.pop()) is not None:
            self._feed(line)

    def _feed(self, line: Line) -> None:
        match line:
            case Decided():
                # The policy was not asked in the replay.
                self._count(Replayed(line.point, line.request_id, line.policy, line.answer, None))
            case RecordingOverflow():
                self.ends_early = "its reader could not keep up"
            case BrokenOff():
                self.ends_early = "its last line is incomplete, as after a full disk or a killed recorder"
            case Started() | InstanceKnown():
                raise InvalidRecordingError("an instance's state after the beginning")
            case MigrationOpened() | PoolOrdered() | CopyOrdered():
                self.control.model.order(line)
            case _:
                if isinstance(line, (Reported, Arrived, Ticked)):
                    self.seconds = line.now_s - self._began_s
                self.control.handle(line)

    # ---- Watcher: called when the policy has decided again

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None:
        """Compare a decision with the recorded one."""
        recorded = self._lines.peek()
        if recorded is None or isinstance(recorded, (RecordingOverflow, BrokenOff)):
            # The recording ends between an input and the decisions on it.
            return
        then: msgspec.Raw | None = None
        asked = question.point.value, question.request_id
        if isinstance(recorded, Decided) and (recorded.point, recorded.request_id) == asked:
            self._lines.pop()
            then = recorded.answer
        self._count(Replayed(*asked, policy, then, recorded_answer(answer)))

    def _count(self, replayed: Replayed) -> None:
        self._policies[replayed.policy] = None
        self.decisions[replayed.point] += 1
        self.acting[replayed.point] += replayed.acted
        self.different[replayed.point] += not replayed.same
        self._on_compared(replayed)

    # ---- Executor: applies the recorded orders, whatever was decided now

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Feed the orders that were given with the recorded decision."""
        while isinstance(event := self._lines.peek(), (MigrationOpened, PoolOrdered, CopyOrdered)):
            self._lines.pop()
            self._feed(event)


def points(counts: Iterable[str]) -> list[str]:
    """Return decision points in their order."""
    seen = set(counts)
    return [point.value for point in DecisionPoint if point.value in seen]
