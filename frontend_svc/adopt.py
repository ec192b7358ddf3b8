"""The commit of a migration: the one place where a running request changes its instance.

A target asks to own a request from index next_index on. It may, if and only if the request is live, the epoch
that the migration started from is still the current one, and every token before next_index has arrived. The
last of those may still be on their way from the source on another stream, so the answer can wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from frontend_svc.links import Outbox
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

# Seconds to wait for tokens in flight.
IN_FLIGHT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Refused:
    """Why an adoption is not granted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Tokens before next_index are still on their way."""

    missing: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Granted. `source` is the owner until now."""

    source: str


def judge(
    table: StreamTable, stream: Stream | None, target: str, adopt: worker_pb2.Adopt
) -> Commit | Wait | Refused:
    """The rule, without side effects."""
    if stream is None or not table.is_live(stream):
        return Refused("the request has ended")
    if stream.request_id != adopt.request_id:
        return Refused("the handle names another request")
    if stream.epoch != adopt.from_epoch:
        return Refused(f"epoch {adopt.from_epoch} is over, it is {stream.epoch} now")
    if adopt.epoch <= stream.epoch:
        return Refused(f"epoch {adopt.epoch} is not after {stream.epoch}")
    if stream.owner is None:
        return Refused("the request is between instances")
    if stream.owner == target:
        return Refused("the request is there already")
    if stream.accepted > adopt.next_index:
        return Refused(f"the source has gone on to index {stream.accepted}")
    if stream.accepted < adopt.next_index:
        return Wait(adopt.next_index - stream.accepted)
    return Commit(stream.owner)


@dataclass(slots=True)
class _Pending:
    target: str
    adopt: worker_pb2.Adopt
    timer: asyncio.TimerHandle


class Adoptions:
    """Answers Adopt and OwnershipQuery; holds the adoptions that wait for tokens, at most one a request."""

    def __init__(
        self,
        table: StreamTable,
        outbox: Outbox,
        on_commit: Callable[[Stream, str, str], None],
        runs: Callable[[str, str], bool],
    ) -> None:
        """`on_commit(stream, source, target)` is told after each commit; `runs(instance, model)`: whether
        that instance may run the model of this key."""
        self._runs = runs
        self._table = table
        self._outbox = outbox
        self._on_commit = on_commit
        self._pending: dict[int, _Pending] = {}

    @property
    def waiting(self) -> bool:
        """Whether any adoption waits; while none does, `progress` need not be called."""
        return bool(self._pending)

    def ask(self, target: str, adopt: worker_pb2.Adopt) -> None:
        """A target asks. A newer question about the same request supersedes a waiting one."""
        self._refuse_pending(adopt.handle, "superseded by another migration")
        self._decide(target, adopt)

    def progress(self) -> None:
        """Tokens were accepted or streams ended: look again at what waits."""
        for handle, pending in list(self._pending.items()):
            stream = self._table.get(handle)
            if not isinstance(judge(self._table, stream, pending.target, pending.adopt), Wait):
                self._take(handle)
                self._decide(pending.target, pending.adopt)

    def ownership(self, asker: str, query: worker_pb2.OwnershipQuery) -> None:
        """A source whose export broke asks whether to go on. If it may, no waiting adoption may still win."""
        stream = self._table.get(query.handle)
        current = stream is not None and stream.owner == asker and stream.epoch == query.epoch
        if current:
            self._refuse_pending(query.handle, "the source goes on")
        answer = worker_pb2.Ownership(handle=query.handle, epoch=query.epoch, current=current)
        self._outbox.send(asker, worker_pb2.AttachUp(ownership=answer))

    def close(self) -> None:
        """Cancel the timers."""
        for handle in list(self._pending):
            self._take(handle)

    def _decide(self, target: str, adopt: worker_pb2.Adopt) -> None:
        stream = self._table.get(adopt.handle)
        verdict = judge(self._table, stream, target, adopt)
        match verdict:
            case Refused(reason):
                self._reply(target, adopt, reason)
            case Wait(missing):
                reason = f"{missing} tokens of the source did not arrive within {IN_FLIGHT_S:g} s"
                timer = asyncio.get_running_loop().call_later(
                    IN_FLIGHT_S, self._refuse_pending, adopt.handle, reason
                )
                self._pending[adopt.handle] = _Pending(target, adopt, timer)
            case Commit(source):
                assert stream is not None
                if stream.model and not self._runs(target, stream.model):
                    # Everybody before should have refused; an answer of two models ends here at the latest.
                    self._reply(target, adopt, "the target runs another model than made the tokens so far")
                    return
                self._commit(stream, source, target, adopt)

    def _commit(self, stream: Stream, source: str, target: str, adopt: worker_pb2.Adopt) -> None:
        # The target must hear of it, or nobody would go on: a target that cannot be told does not get it.
        accepted = worker_pb2.AdoptReply(migration_id=adopt.migration_id, handle=adopt.handle, accepted=True)
        if not self._outbox.send(target, worker_pb2.AttachUp(adopt_reply=accepted)):
            return
        old_epoch = stream.epoch
        self._table.hand_over(stream, target, adopt.epoch)
        release = worker_pb2.Release(handle=stream.handle, epoch=old_epoch)
        self._outbox.send(source, worker_pb2.AttachUp(release=release))
        self._on_commit(stream, source, target)

    def _refuse_pending(self, handle: int, reason: str) -> None:
        pending = self._take(handle)
        if pending is not None:
            self._reply(pending.target, pending.adopt, reason)

    def _reply(self, target: str, adopt: worker_pb2.Adopt, reason: str) -> None:
        reply = worker_pb2.AdoptReply(
            migration_id=adopt.migration_id, handle=adopt.handle, accepted=False, reason=reason
        )
        self._outbox.send(target, worker_pb2.AttachUp(adopt_reply=reply))

    def _take(self, handle: int) -> _Pending | None:
        pending = self._pending.pop(handle, None)
        if pending is not None:
            pending.timer.cancel()
        return pending
