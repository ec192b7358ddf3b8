"""Probation for streams whose engine died: one at a time per instance, until each has made progress.

A request that crashes engines does so again wherever it is sent, and everything that shares its second engine
becomes a suspect as well. So of the streams that an engine had when it died, an instance gets one at a time;
after PROGRESS_TOKENS more tokens that one is cleared and the next one follows. Streams that had no token yet
on the engine that died go first, because crashes mostly come from prompts, and so do those that were on more
than one engine that died.

Other front ends have suspects too and do not know of these: a worker accepts suspects of one front end at a
time (worker_agent/dispatch.py) and rejects the others.

Clearing all suspects takes as long as their prompts take one after the other. If that is too long (long
queues, or very many streams), the number per instance doubles every WIDEN_S seconds: nobody waits forever
because of a crash that may have had other reasons. While no suspect runs, as when the crash took the last
instance, they wait for an instance and not for each other: then it does not double, and when an instance
comes, it again gets one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from frontend_svc.requests import Requests, Where
from frontend_svc.streams import Stream, StreamTable

# Tokens after which a stream has made progress. More than the steps that an engine has in flight: a token can
# be made and then lost with the engine that crashes on the next one.
PROGRESS_TOKENS: Final = 3
WIDEN_S: Final = 2.0
# Seconds after which a suspect may share an instance with another one if there is no free one.
EXCLUSIVE_S: Final = 2.0


def has_progressed(stream: Stream) -> bool:
    """Return whether the stream ran since its engine was last lost, so that it did not crash the one it is
    on."""
    return stream.accepted - stream.tokens_at_loss >= PROGRESS_TOKENS


class Probation:
    """Queue the suspects and start them as instances become free.

    Pure but for the streams that it starts; times are seconds of one monotonic clock.
    """

    def __init__(
        self,
        table: StreamTable,
        attached: Callable[[], list[str]],
        requests: Requests,
        clock: Callable[[], float],
        on_cleared: Callable[[Stream], None],
    ) -> None:
        """Start suspects through `requests`; `on_cleared(stream)` is called for each that has made
        progress."""
        self._on_cleared = on_cleared
        self._table = table
        self._attached = attached
        self._requests = requests
        self._clock = clock
        # Waiting suspects by handle, each with where it may be placed: the prime suspects, and the others.
        self._prime_suspects: dict[int, tuple[Stream, Where]] = {}
        self._other_suspects: dict[int, tuple[Stream, Where]] = {}
        # Started, not cleared yet.
        self._active: dict[int, Stream] = {}
        # How many suspects an instance gets at a time, and when that last changed.
        self._width = 1
        self._widened_s = 0.0

    def add(self, streams: Iterable[Stream], avoid: frozenset[str]) -> None:
        """Put these streams on probation."""
        if not self._prime_suspects and not self._other_suspects:
            self._widened_s = self._clock()
        for stream in streams:
            before_others = stream.deaths > 1 or stream.accepted == stream.tokens_at_placement
            waiting = self._prime_suspects if before_others else self._other_suspects
            waiting[stream.handle] = (stream, Where(avoid))
        self._release()

    def tighten(self) -> None:
        """Go back to one suspect per instance: an engine died again."""
        self._width, self._widened_s = 1, self._clock()

    def instance_attached(self) -> None:
        """Let suspects that waited for an instance share it no sooner than others do."""
        until_s = self._clock() + EXCLUSIVE_S
        for stream in self._active.values():
            if stream.owner is None:
                stream.exclusive_until_s = until_s

    def drop(self, streams: Iterable[Stream]) -> None:
        """Remove streams that were lost again or have ended."""
        for stream in streams:
            self._forget(stream.handle)
        self._release()

    def clear(self, streams: Iterable[Stream]) -> None:
        """Start those of these streams that wait at once: no engine died."""
        for stream in streams:
            waiting = self._forget(stream.handle)
            if waiting is not None and self._table.is_live(stream):
                self._requests.place_again(*waiting)
        self._release()

    def check_progress(self) -> None:
        """Clear active suspects that have progressed or ended, and start the next ones."""
        done = [
            handle
            for handle, stream in self._active.items()
            if has_progressed(stream) or self._table.get(handle) is not stream
        ]
        for handle in done:
            stream = self._active.pop(handle)
            stream.exclusive_until_s = 0.0
            if self._table.get(handle) is stream:
                self._on_cleared(stream)
        if done:
            self._release()

    def tick(self, now_s: float) -> None:
        """Drop ended streams and widen when that is due. Called periodically."""
        for waiting in (self._prime_suspects, self._other_suspects):
            for handle in [h for h, (stream, _) in waiting.items() if self._table.get(h) is not stream]:
                del waiting[handle]
        self.check_progress()
        if not self._prime_suspects and not self._other_suspects:
            self._width = 1
        elif all(stream.owner is None for stream in self._active.values()):
            self._widened_s = now_s
        elif now_s - self._widened_s >= WIDEN_S:
            self._width, self._widened_s = 2 * self._width, now_s
            self._release()

    def forbidden(self, stream: Stream) -> Callable[[], frozenset[str]]:
        """Return a function that gives the instances that the stream must not use because they have another
        suspect."""
        if stream.handle not in self._active:
            return frozenset
        until_s = stream.exclusive_until_s

        def at_capacity() -> frozenset[str]:
            if self._clock() >= until_s:
                return frozenset()
            others = (active.owner for active in self._active.values() if active is not stream)
            counts = Counter(owner for owner in others if owner is not None)
            return frozenset(owner for owner, count in counts.items() if count >= self._width)

        return at_capacity

    def _release(self) -> None:
        free = self._width * max(1, len(self._attached())) - len(self._active)
        for waiting in (self._prime_suspects, self._other_suspects):
            while free > 0 and waiting:
                handle = next(iter(waiting))
                stream, where = waiting.pop(handle)
                if self._table.get(handle) is not stream:
                    continue
                self._active[handle] = stream
                stream.exclusive_until_s = self._clock() + EXCLUSIVE_S
                self._requests.place_again(stream, Where(where.avoid, self.forbidden(stream)))
                free -= 1

    def _forget(self, handle: int) -> tuple[Stream, Where] | None:
        """Remove a suspect; return what it waited with if it waited."""
        if (active := self._active.pop(handle, None)) is not None:
            active.exclusive_until_s = 0.0
        return self._prime_suspects.pop(handle, None) or self._other_suspects.pop(handle, None)
