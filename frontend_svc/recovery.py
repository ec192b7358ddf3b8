"""Streams whose instance was lost, or gave them up, go on elsewhere from the next index.

The new instance gets every accepted token, computes the KV anew and emits from there; the epoch was raised
when the stream was taken from its owner, so nothing that the old instance still says counts.

Some losses are the doing of a request. A stream that was on an engine when it died, and again on the next
one without having got on in between, is ended if it alone was in that position. It must have been there: an
engine that was dead when the request was sent to it has not died of it. What counts is an engine that died:
one that said so, or whose process is gone without a goodbye. A worker that was told to stop, or that could
not be reached for a while, says nothing of its requests.

So streams whose engine died come back on probation: one at a time to each instance, until each has shown that
it does no harm. A request that crashes engines does so again wherever it is sent. Whatever shares its second
engine with it is under the same suspicion, unless nothing does: so of the streams that an engine had when it
died, an instance gets one at a time. It is cleared by GOT_ON_TOKENS more tokens, and the next one follows.
Those that had not made a token on the engine that died go first, a prompt is what crashes engines mostly; and
those of which it was more than one.

Other front ends have suspects, too, and know nothing of these: a worker takes those of one front end at a
time (worker_agent/dispatch.py), and turns the others away.

That takes as long as their prompts take one after the other. Where it takes longer (queues are long, or
there are very many), the number that an instance gets at a time doubles every WIDEN_S seconds: nobody
waits for ever for the sake of a crash that may have had other reasons.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from frontend_svc.dispatch import Dispatch
from frontend_svc.links import Loss, LossCause, Workers, abort
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# Tokens after which a stream has got on. More than the steps that an engine has under way at a time: a
# token can be made, and lost with the engine that crashes on the next one.
GOT_ON_TOKENS: Final = 3
WIDEN_S: Final = 2.0
# One that finds only instances that are taken goes to any after so long.
BARRED_S: Final = 2.0


class Starter(Protocol):
    """What brings streams onto instances (dispatch.Dispatch)."""

    def start(
        self, stream: Stream, avoid: frozenset[str] = ..., barred: Callable[[], frozenset[str]] = ...
    ) -> None:
        """Find an instance; `avoid`: only if there is no other, `barred`: not these."""


def got_on(stream: Stream) -> bool:
    """Whether the stream has run since its engine was last lost: it did not crash the one that it is on."""
    return stream.accepted - stream.lost_at >= GOT_ON_TOKENS


class Probation:
    """Streams whose engine died come back one at a time to each instance, until each has shown that it is
    harmless. Pure but for the streams that it starts; times are seconds of one monotonic clock.

    A request that crashes engines does so again wherever it is sent. Whatever shares its second engine with
    it is under the same suspicion, unless nothing does: so of the streams that an engine had when it died, an
    instance gets one at a time. It is cleared by GOT_ON_TOKENS more tokens, and the next one follows. Those
    that had not made a token on the engine that died go first, a prompt is what crashes engines mostly; and
    those of which it was more than one.

    Other front ends have suspects, too, and know nothing of these: a worker takes those of one front end at a
    time (worker_agent/dispatch.py), and turns the others away.

    That takes as long as their prompts take one after the other. Where it takes longer (queues are long, or
    there are very many), the number that an instance gets at a time doubles every WIDEN_S seconds: nobody
    waits for ever for the sake of a crash that may have had other reasons.
    """

    def __init__(
        self,
        table: StreamTable,
        attached: Callable[[], list[str]],
        dispatch: Starter,
        clock: Callable[[], float],
        on_cleared: Callable[[Stream], None],
    ) -> None:
        """`on_cleared` is told of each that has got on where it is."""
        self._on_cleared = on_cleared
        self._table = table
        self._attached = attached
        self._dispatch = dispatch
        self._clock = clock
        # Waiting, by handle, each with the instances to avoid: those under most suspicion, and the others.
        self._first: dict[int, tuple[Stream, frozenset[str]]] = {}
        self._second: dict[int, tuple[Stream, frozenset[str]]] = {}
        # Under way, not cleared yet.
        self._active: dict[int, Stream] = {}
        # How many an instance gets at a time, and when that was last changed.
        self._width = 1
        self._widened_s = 0.0

    def __bool__(self) -> bool:
        """Whether anybody is under way or waits."""
        return bool(self._active or self._first or self._second)

    def add(self, streams: Iterable[Stream], avoid: frozenset[str]) -> None:
        """These have to show that they do no harm."""
        if not self._first and not self._second:
            self._widened_s = self._clock()
        for stream in streams:
            before_others = stream.deaths > 1 or stream.accepted == stream.placed_at
            waiting = self._first if before_others else self._second
            waiting[stream.handle] = (stream, avoid)
        self._release()

    def tighten(self) -> None:
        """An engine died again: one at a time from now on."""
        self._width, self._widened_s = 1, self._clock()

    def drop(self, streams: Iterable[Stream]) -> None:
        """Forget these: they were lost again, or have ended."""
        for stream in streams:
            self._forget(stream.handle)
        self._release()

    def clear(self, streams: Iterable[Stream]) -> None:
        """No engine died: those of these that wait go on at once."""
        for stream in streams:
            waiting = self._forget(stream.handle)
            if waiting is not None and self._table.is_live(stream):
                self._dispatch.start(*waiting)
        self._release()

    def look(self) -> None:
        """Streams may have got on or ended: their instances are free for the next."""
        done = [
            handle
            for handle, stream in self._active.items()
            if got_on(stream) or self._table.get(handle) is not stream
        ]
        for handle in done:
            stream = self._active.pop(handle)
            stream.alone_until_s = 0.0
            if self._table.get(handle) is stream:
                self._on_cleared(stream)
        if done:
            self._release()

    def tick(self, now_s: float) -> None:
        """Called again and again."""
        for waiting in (self._first, self._second):
            for handle in [h for h, (stream, _) in waiting.items() if self._table.get(h) is not stream]:
                del waiting[handle]
        self.look()
        if not self._first and not self._second:
            self._width = 1
        elif now_s - self._widened_s >= WIDEN_S:
            self._width, self._widened_s = 2 * self._width, now_s
            self._release()

    def barred(self, stream: Stream) -> Callable[[], frozenset[str]]:
        """Instances that the stream must not go to at the moment of the call: they have another one."""
        if stream.handle not in self._active:
            return frozenset
        until_s = stream.alone_until_s

        def taken() -> frozenset[str]:
            if self._clock() >= until_s:
                return frozenset()
            others = (each.owner for each in self._active.values() if each is not stream)
            counts = Counter(owner for owner in others if owner is not None)
            return frozenset(owner for owner, count in counts.items() if count >= self._width)

        return taken

    def _release(self) -> None:
        room = self._width * max(1, len(self._attached())) - len(self._active)
        for waiting in (self._first, self._second):
            while room > 0 and waiting:
                handle = next(iter(waiting))
                stream, avoid = waiting.pop(handle)
                if self._table.get(handle) is not stream:
                    continue
                self._active[handle] = stream
                stream.alone_until_s = self._clock() + BARRED_S
                self._dispatch.start(stream, avoid, self.barred(stream))
                room -= 1

    def _forget(self, handle: int) -> tuple[Stream, frozenset[str]] | None:
        """What it waited with, if it waited."""
        if (active := self._active.pop(handle, None)) is not None:
            active.alone_until_s = 0.0
        return self._first.pop(handle, None) or self._second.pop(handle, None)


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
