"""Streams whose engine died come back one at a time to each instance, until each has shown that it does
no harm.

A request that crashes engines does so again wherever it is sent. Whatever shares its second engine with
it is under the same suspicion, unless nothing does: so of the streams that an engine had when it died, an
instance gets one at a time. It is cleared by GOT_ON_TOKENS more tokens, and the next one follows. Those
that had not made a token on the engine that died go first, a prompt is what crashes engines mostly; and
those of which it was more than one.

Other front ends have suspects, too, and know nothing of these: a worker takes those of one front end at a
time (worker_agent/suspects.py), and turns the others away.

That takes as long as their prompts take one after the other. Where it takes longer (queues are long, or
there are very many), the number that an instance gets at a time doubles every WIDEN_S seconds: nobody
waits for ever for the sake of a crash that may have had other reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from frontend_svc.streams import Stream, StreamTable

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
    """Pure but for the streams that it starts; times are seconds of one monotonic clock."""

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
