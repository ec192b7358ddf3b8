"""Streams whose instance was lost, or gave them up, go on elsewhere from the next index.

The new instance gets every accepted token, computes the KV anew and emits from there; the epoch was raised
when the stream was taken from its owner, so nothing that the old instance still says counts.

Some losses are the doing of a request. A stream that was on an engine when it died, and again on the next
one without having got on in between, is ended if it alone was in that position (probation.py sees to
that). It must have been there: an engine that was dead when the request was sent to it has not died of it.
What counts is an engine that died: one that said so, or whose process is gone without a goodbye. A worker
that was told to stop, or that could not be reached for a while, says nothing of its requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from frontend_svc.dispatch import Dispatch
from frontend_svc.link import Loss, LossCause
from frontend_svc.outbox import abort
from frontend_svc.probation import GOT_ON_TOKENS, Probation, got_on
from frontend_svc.streams import Stream, StreamTable
from frontend_svc.workers import Workers
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

# A request that instances keep giving up is at fault itself.
MAX_FAILURES: Final = 3
# One that loses its instance so often in a row without having got on in between, whatever the reasons, is
# not tried again; and one that was on so many engines when they died, though never alone.
MAX_LOSSES: Final = 8
MAX_DEATHS: Final = 4
# After so long without news of a lost instance, nothing is held against its streams.
VERDICT_S: Final = 2.0


@dataclass(slots=True)
class _Case:
    """A loss whose reason is not known yet."""

    instance_id: str
    incarnation: str
    # What the instance carried, by handle, and how long each was then.
    streams: dict[int, tuple[Stream, int]]
    lost_s: float
    # Those of them that were on an engine that died before, and have not got on since: not placed until
    # more is known.
    held: dict[int, Stream] = field(default_factory=dict)

    def suspects(self) -> list[Stream]:
        """Those that have not got on since."""
        return [
            stream for stream, length in self.streams.values() if stream.accepted - length < GOT_ON_TOKENS
        ]


class Recovery:
    """Restarts streams, within bounds."""

    def __init__(
        self,
        table: StreamTable,
        dispatch: Dispatch,
        workers: Workers,
        give_up: Callable[[Stream, str], None],
        on_engine_died: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`give_up(stream, reason)` ends a stream as an error; `on_engine_died(instance)` is told of each
        engine that died with streams of ours."""
        self._table = table
        self._dispatch = dispatch
        self._workers = workers
        self._give_up = give_up
        self._on_engine_died = on_engine_died
        self._clock = clock
        self._probation = Probation(table, workers.attached, dispatch, clock, self._tell_cleared)
        self._cases: dict[str, _Case] = {}
        # Of each instance's process as last attached.
        self._incarnations: dict[str, str] = {}

    @property
    def watching(self) -> bool:
        """Whether `progress` has anything to look at."""
        return bool(self._probation)

    def instance_lost(self, instance_id: str, loss: Loss) -> list[Stream]:
        """Take everything from the instance; returns the streams that were on it."""
        lost = self._table.orphan_all(instance_id)
        if not lost:
            return lost
        log.warning("%d streams of %s go on elsewhere", len(lost), instance_id)
        # If it was only stopped, it finds this when it wakes up.
        self._workers.send_on_wakeup(instance_id, abort([stream.handle for stream in lost]))
        self._probation.drop(lost)
        if loss.cause is LossCause.STOPPED:
            self._restart(lost, instance_id)
            return lost
        # What no engine ever had has no part in its death.
        never = [stream for stream in lost if not stream.was_there]
        for stream in never:
            stream.losses += 1
        self._restart(never, instance_id)
        carried = {stream.handle: (stream, stream.accepted) for stream in lost if stream.was_there}
        case = _Case(instance_id, self._incarnations.get(instance_id, ""), carried, self._clock())
        in_doubt = self._in_doubt()
        for stream, _ in carried.values():
            if got_on(stream):
                stream.deaths = stream.losses = 0
            stream.lost_at = stream.accepted
            stream.losses += 1
            if stream.deaths or stream.handle in in_doubt:
                case.held[stream.handle] = stream
        if loss.cause is LossCause.ENGINE_FAILED:
            self._engine_died(case)
        else:
            self._cases[instance_id] = case
        others = [stream for stream, _ in carried.values() if stream.handle not in case.held]
        if loss.cause is LossCause.SILENT:
            # An engine that dies ends its process, and closes the connection.
            self._restart(others, instance_id)
        else:
            self._on_probation(others, instance_id)
        return lost

    def process_gone(self, instance_id: str) -> None:
        """The process of an instance that was lost has ended."""
        case = self._cases.pop(instance_id, None)
        if case is not None:
            self._engine_died(case)

    def attached(self, instance_id: str, incarnation: str) -> None:
        """An instance answers: the process that was lost, or another one in its place."""
        self._incarnations[instance_id] = incarnation
        case = self._cases.pop(instance_id, None)
        if case is None:
            return
        if case.incarnation == incarnation:
            self._nothing_died(case)
        else:
            self._engine_died(case)

    def failed(self, streams: Iterable[Stream], instance_id: str) -> None:
        """The instance gave these streams up, or lost or repeated a token of theirs."""
        streams = list(streams)
        self._workers.send(instance_id, abort([stream.handle for stream in streams]))
        self._probation.drop(streams)
        self._restart(streams, instance_id)

    def turned_away(self, stream: Stream, instance_id: str) -> None:
        """The instance has as many requests as it may."""
        self._table.orphan(stream)
        self._dispatch.start_again(stream, instance_id, self._probation.barred(stream))

    def progress(self) -> None:
        """Streams have got tokens, or ended."""
        self._probation.look()

    def tick(self) -> None:
        """Called every half second."""
        now_s = self._clock()
        self._forget_gone()
        for case in [case for case in self._cases.values() if now_s - case.lost_s > VERDICT_S]:
            del self._cases[case.instance_id]
            self._nothing_died(case)
        self._probation.tick(now_s)

    def _forget_gone(self) -> None:
        """Instances come and go, each with a name of its own."""
        known = {*self._workers.attached(), *self._cases}
        if len(self._incarnations) > len(known):
            self._incarnations = {name: it for name, it in self._incarnations.items() if name in known}

    def _engine_died(self, case: _Case) -> None:
        """Its streams are suspects; one that is so for the second time, and alone, did it."""
        self._on_engine_died(case.instance_id)
        self._probation.tighten()
        suspects = [stream for stream in case.suspects() if self._table.is_live(stream)]
        for stream in suspects:
            stream.deaths += 1
        twice = [stream for stream in suspects if stream.deaths > 1]
        log.warning(
            "the engine of %s died with %d streams; %d of them were on another one that died",
            case.instance_id,
            len(case.streams),
            len(twice),
        )
        ended = twice if len(twice) == 1 else [s for s in twice if s.deaths >= MAX_DEATHS]
        for stream in ended:
            self._end(
                stream, f"it was on {_NUMBERS[stream.deaths]} engines when they died, and is not tried again"
            )
        self._let_go([s for s in case.held.values() if s not in ended], case.instance_id)

    def _nothing_died(self, case: _Case) -> None:
        """The instance was out of reach for a while: nothing is held against its streams."""
        self._probation.clear([stream for stream, _ in case.streams.values() if not stream.deaths])
        self._let_go(list(case.held.values()), case.instance_id)

    def _in_doubt(self) -> set[int]:
        """Streams of losses whose reasons are not known yet."""
        return {stream.handle for case in self._cases.values() for stream in case.suspects()}

    def _let_go(self, held: list[Stream], instance_id: str) -> None:
        """These were held for the sake of a loss that is explained now; some wait for another one's
        explanation."""
        free = []
        for stream in held:
            other = next((case for case in self._cases.values() if stream.handle in case.streams), None)
            if other is None:
                free.append(stream)
            else:
                other.held[stream.handle] = stream
        self._on_probation(free, instance_id)

    def _on_probation(self, streams: Iterable[Stream], instance_id: str) -> None:
        """These may have been what crashed the instance."""
        self._probation.add(self._within_bounds(streams, instance_id), frozenset({instance_id}))

    def _restart(self, streams: Iterable[Stream], instance_id: str) -> None:
        """These go on elsewhere, suspects as such."""
        avoid = frozenset({instance_id})
        suspects = []
        for stream in self._within_bounds(streams, instance_id):
            if stream.deaths and not got_on(stream):
                suspects.append(stream)
            else:
                self._dispatch.start(stream, avoid)
        self._probation.add(suspects, avoid)

    def _within_bounds(self, streams: Iterable[Stream], instance_id: str) -> list[Stream]:
        """Those that may be tried again; the others end."""
        kept = []
        for stream in streams:
            if not self._table.is_live(stream):
                continue
            if stream.failures > MAX_FAILURES:
                self._give_up(stream, f"it failed {stream.failures} times, last on {instance_id}")
            elif stream.losses > MAX_LOSSES:
                self._give_up(stream, f"its instance was lost {stream.losses} times in a row")
            else:
                kept.append(stream)
        return kept

    def _tell_cleared(self, stream: Stream) -> None:
        """Its instance may have another front end's suspects."""
        if stream.owner is not None:
            cleared = worker_pb2.AttachUp(cleared=worker_pb2.Cleared(handles=[stream.handle]))
            self._workers.send(stream.owner, cleared)

    def _end(self, stream: Stream, reason: str) -> None:
        """Wherever it is by now."""
        self._probation.drop([stream])
        self._dispatch.cancel(stream)
        if stream.owner is not None:
            self._workers.send(stream.owner, abort([stream.handle]))
        self._give_up(stream, reason)


_NUMBERS: Final = {2: "two", 3: "three", 4: "four", 5: "five"}
