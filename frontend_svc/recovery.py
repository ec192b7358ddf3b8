"""Restart streams whose instance was lost or gave them up: they continue on another one from the next index.

The new instance gets every accepted token, recomputes the KV and continues from there. Taking the stream from
its owner raised the epoch, so nothing that the old instance still sends is accepted.

A request can itself crash engines. A stream that was on an engine when it died, and again on the next one
without progress in between, is ended if it is the only such stream. Only streams that reached the engine
count: an engine that was dead when the request was submitted did not die of it. Only engines that died count,
too: those that reported a failure or whose process is gone without a goodbye. A worker that was stopped, or
that could not be reached for a while, says nothing about its requests.

Streams whose engine died are therefore restarted on probation (`Probation`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from frontend_svc.links import Loss, LossCause, WorkerLinks, abort_message
from frontend_svc.requests import Requests, Where
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# A request that instances give up more often than this is assumed to be at fault itself.
MAX_FAILURES: Final = 3
# A stream that loses its instance more often than MAX_LOSSES in a row without progress is not restarted,
# whatever the reasons; nor is one that was on MAX_DEATHS engines when they died, though never alone.
MAX_LOSSES: Final = 8
MAX_DEATHS: Final = 4
# Seconds after which a loss that is still unexplained is not held against the streams.
EXPLAIN_S: Final = 2.0


@dataclass(slots=True)
class _UnexplainedLoss:
    """A loss of which it is not known yet whether the engine died."""

    instance_id: str
    incarnation: str
    # The streams on the instance by handle, each with its number of tokens at the loss.
    streams: dict[int, tuple[Stream, int]]
    lost_s: float
    # Streams that were on an engine that died before, without progress since. They are not placed until the
    # loss is explained.
    withheld: dict[int, Stream] = field(default_factory=dict)

    def suspects(self) -> list[Stream]:
        """Return the streams without progress since the loss."""
        return [
            stream for stream, length in self.streams.values() if stream.accepted - length < PROGRESS_TOKENS
        ]


class Recovery:
    """Restart lost and failed streams a bounded number of times."""

    def __init__(
        self,
        table: StreamTable,
        requests: Requests,
        workers: WorkerLinks,
        on_engine_died: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Restart through `requests`.

        `on_engine_died(instance)` is called for each engine that died with streams of this front end.
        """
        self._table = table
        self._requests = requests
        self._workers = workers
        self._on_engine_died = on_engine_died
        self._clock = clock
        self._probation = Probation(table, workers.attached, requests, clock, self._send_cleared)
        self._unexplained: dict[str, _UnexplainedLoss] = {}
        # The incarnation of each instance's process when it last attached.
        self._incarnations: dict[str, str] = {}

    def instance_lost(self, instance_id: str, loss: Loss) -> list[Stream]:
        """Take all streams from the instance and restart them; return those that were on it.

        When they restart depends on the cause:

        - STOPPED: at once, and it does not count as a loss.
        - Any other, for a stream that never reached the engine: at once.
        - SILENT: at once.
        - BROKEN, ENGINE_FAILED: on probation, one at a time per instance.
        - For a stream in doubt (an engine died with it before, or an earlier loss that is unexplained may be
          its doing): on probation, once this loss is explained, after EXPLAIN_S at the latest.
        """
        lost = self._table.orphan_all(instance_id)
        if not lost:
            return lost
        log.warning("%d streams of %s continue elsewhere", len(lost), instance_id)
        # If the process was only suspended, it reads this when it resumes.
        self._workers.send_on_wakeup(instance_id, abort_message([stream.handle for stream in lost]))
        self._probation.drop(lost)
        if loss.cause is LossCause.STOPPED:
            self._restart(lost, instance_id)
            return lost
        # A stream that never reached the engine cannot have crashed it.
        never = [stream for stream in lost if not stream.reached_engine]
        for stream in never:
            stream.losses += 1
        self._restart(never, instance_id)
        running = {stream.handle: (stream, stream.accepted) for stream in lost if stream.reached_engine}
        case = _UnexplainedLoss(instance_id, self._incarnations.get(instance_id, ""), running, self._clock())
        in_doubt = self._in_doubt()
        for stream, _ in running.values():
            if has_progressed(stream):
                stream.deaths = stream.losses = 0
            stream.tokens_at_loss = stream.accepted
            stream.losses += 1
            if stream.deaths or stream.handle in in_doubt:
                case.withheld[stream.handle] = stream
        if loss.cause is LossCause.ENGINE_FAILED:
            self._engine_died(case)
        else:
            self._unexplained[instance_id] = case
        others = [stream for stream, _ in running.values() if stream.handle not in case.withheld]
        if loss.cause is LossCause.SILENT:
            # A dying engine ends its process, which closes the connection: silence is not a crash.
            self._restart(others, instance_id)
        else:
            self._on_probation(others, instance_id)
        return lost

    def process_gone(self, instance_id: str) -> None:
        """Record that the process of a lost instance has ended."""
        case = self._unexplained.pop(instance_id, None)
        if case is not None:
            self._engine_died(case)

    def silence_explained(self, instance_id: str) -> None:
        """Record that a lost instance has said goodbye after all: its process ends, but not of its
        requests."""
        case = self._unexplained.pop(instance_id, None)
        if case is not None:
            self._engine_survived(case)

    def attached(self, instance_id: str, incarnation: str) -> None:
        """Record that an instance answers, and from its incarnation whether the lost process survived."""
        self._incarnations[instance_id] = incarnation
        self._probation.instance_attached()
        case = self._unexplained.pop(instance_id, None)
        if case is None:
            return
        if case.incarnation == incarnation:
            self._engine_survived(case)
        else:
            self._engine_died(case)

    def restart_failed(self, streams: Iterable[Stream], instance_id: str, reason: str = "") -> None:
        """Restart streams that the instance gave up, for the reason if it gives one, or of which it lost or
        repeated a token."""
        streams = list(streams)
        self._workers.send(instance_id, abort_message([stream.handle for stream in streams]))
        self._probation.drop(streams)
        self._restart(streams, instance_id, reason)

    def instance_busy(self, stream: Stream, instance_id: str) -> None:
        """Place a stream elsewhere that the instance rejected because it has as many requests as it may."""
        self._table.orphan(stream)
        where = Where(forbidden=self._probation.forbidden(stream))
        self._requests.place_elsewhere(stream, instance_id, where)

    def check_progress(self) -> None:
        """Look for suspects that have made progress or ended."""
        self._probation.check_progress()

    def tick(self) -> None:
        """Close losses that stayed unexplained and widen probation. Called every half second."""
        now_s = self._clock()
        self._forget_gone()
        for case in [case for case in self._unexplained.values() if now_s - case.lost_s > EXPLAIN_S]:
            del self._unexplained[case.instance_id]
            self._engine_survived(case)
        self._probation.tick(now_s)

    def _forget_gone(self) -> None:
        """Drop incarnations of instances that are gone: each new instance has a name of its own."""
        known = {*self._workers.attached(), *self._unexplained}
        if len(self._incarnations) > len(known):
            self._incarnations = {
                name: incarnation for name, incarnation in self._incarnations.items() if name in known
            }

    def _engine_died(self, case: _UnexplainedLoss) -> None:
        """Count the death against its suspects; end the one that is a suspect for the second time, if it is
        the only one."""
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
            self._end_stream(
                stream, f"it was on {_NUMBERS[stream.deaths]} engines when they died, and is not tried again"
            )
        self._release_withheld([s for s in case.withheld.values() if s not in ended], case.instance_id)

    def _engine_survived(self, case: _UnexplainedLoss) -> None:
        """Release the streams: the instance was only out of reach for a while."""
        self._probation.clear([stream for stream, _ in case.streams.values() if not stream.deaths])
        self._release_withheld(list(case.withheld.values()), case.instance_id)

    def _in_doubt(self) -> set[int]:
        """Return the handles of suspects of losses that are not explained yet."""
        return {stream.handle for case in self._unexplained.values() for stream in case.suspects()}

    def _release_withheld(self, withheld: list[Stream], instance_id: str) -> None:
        """Restart streams withheld for a loss that is now explained, unless another unexplained loss has them
        too."""
        free = []
        for stream in withheld:
            other = next((case for case in self._unexplained.values() if stream.handle in case.streams), None)
            if other is None:
                free.append(stream)
            else:
                other.withheld[stream.handle] = stream
        self._on_probation(free, instance_id)

    def _on_probation(self, streams: Iterable[Stream], instance_id: str) -> None:
        """Restart streams that may have crashed the instance."""
        self._probation.add(self._within_bounds(streams, instance_id), frozenset({instance_id}))

    def _restart(self, streams: Iterable[Stream], instance_id: str, reason: str = "") -> None:
        """Restart streams elsewhere; known suspects among them stay on probation."""
        avoid = frozenset({instance_id})
        suspects = []
        for stream in self._within_bounds(streams, instance_id, reason):
            if stream.deaths and not has_progressed(stream):
                suspects.append(stream)
            else:
                self._requests.place_again(stream, Where(avoid))
        self._probation.add(suspects, avoid)

    def _within_bounds(self, streams: Iterable[Stream], instance_id: str, reason: str = "") -> list[Stream]:
        """Return the streams that may be restarted; give up the others."""
        restarted = []
        for stream in streams:
            if not self._table.is_live(stream):
                continue
            if stream.failures > MAX_FAILURES:
                why = f": {reason}" if reason else ""
                self._requests.give_up(
                    stream, f"it failed {stream.failures} times, last on {instance_id}{why}"
                )
            elif stream.losses > MAX_LOSSES:
                self._requests.give_up(stream, f"its instance was lost {stream.losses} times in a row")
            else:
                restarted.append(stream)
        return restarted

    def _send_cleared(self, stream: Stream) -> None:
        """Tell the stream's instance, so that it may accept another front end's suspects."""
        if stream.owner is not None:
            cleared = worker_pb2.AttachUp(cleared=worker_pb2.Cleared(handles=[stream.handle]))
            self._workers.send(stream.owner, cleared)

    def _end_stream(self, stream: Stream, reason: str) -> None:
        """Abort and give up a stream, wherever it is by now."""
        self._probation.drop([stream])
        if stream.owner is not None:
            self._workers.send(stream.owner, abort_message([stream.handle]))
        self._requests.give_up(stream, reason)


_NUMBERS: Final = {2: "two", 3: "three", 4: "four", 5: "five"}


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
    """Restart streams whose engine died one at a time per instance, until each has made progress.

    A request that crashes engines does so again wherever it is sent, and everything that shares its second
    engine becomes a suspect as well. So of the streams that an engine had when it died, an instance gets one
    at a time; after PROGRESS_TOKENS more tokens that one is cleared and the next one follows. Streams that
    had no token yet on the engine that died go first, because crashes mostly come from prompts, and so do
    those that were on more than one engine that died.

    Other front ends have suspects too and do not know of these: a worker accepts suspects of one front end at
    a time (worker_agent/dispatch.py) and rejects the others.

    Clearing all suspects takes as long as their prompts take one after the other. If that is too long (long
    queues, or very many streams), the number per instance doubles every WIDEN_S seconds: nobody waits forever
    because of a crash that may have had other reasons. While no suspect runs, as when the crash took the last
    instance, they wait for an instance and not for each other: then it does not double, and when an instance
    comes, it again gets one at a time.

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
