"""Commit migrations: the one place where a request changes its owner without being taken from it first.

A target asks to own a request from index next_index on. It may if and only if the request is live, the epoch
that the migration started from is still current, and every token before next_index has arrived. The last of
those may still be in flight from the source on another stream, so the reply can wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from frontend_svc.links import Outbox
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

# Seconds to wait for tokens that are in flight.
IN_FLIGHT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RefuseAdoption:
    """Why an adoption is refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Tokens before next_index are still in flight."""

    missing: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The adoption is granted. `source` is the owner until now."""

    source: str


def evaluate(
    table: StreamTable, stream: Stream | None, target: str, adopt: worker_pb2.Adopt
) -> Commit | Wait | RefuseAdoption:
    """Decide on an adoption, without side effects."""
    if stream is None or not table.is_live(stream):
        return RefuseAdoption("the request has ended")
    if stream.request_id != adopt.request_id:
        return RefuseAdoption("the handle names another request")
    if stream.epoch != adopt.from_epoch:
        return RefuseAdoption(f"epoch {adopt.from_epoch} is over, it is {stream.epoch} now")
    if adopt.epoch <= stream.epoch:
        return RefuseAdoption(f"epoch {adopt.epoch} is not after {stream.epoch}")
    if stream.owner is None:
        return RefuseAdoption("the request is between instances")
    if stream.owner == target:
        return RefuseAdoption("the request is already there")
    if stream.accepted > adopt.next_index:
        return RefuseAdoption(f"the source has continued to index {stream.accepted}")
    if stream.accepted < adopt.next_index:
        return Wait(adopt.next_index - stream.accepted)
    return Commit(stream.owner)


@dataclass(slots=True)
class _Pending:
    target: str
    adopt: worker_pb2.Adopt
    timer: asyncio.TimerHandle


class Adoptions:
    """Answer Adopt and OwnershipQuery; hold adoptions that wait for tokens, at most one per request."""

    def __init__(
        self,
        table: StreamTable,
        outbox: Outbox,
        on_commit: Callable[[Stream, str, str], None],
        may_run: Callable[[str, str], bool],
    ) -> None:
        """`on_commit(stream, source, target)` is called after each commit.

        `may_run(instance, model)` returns whether that instance may run the model of this key.
        """
        self._may_run = may_run
        self._table = table
        self._outbox = outbox
        self._on_commit = on_commit
        self._pending: dict[int, _Pending] = {}

    def request(self, target: str, adopt: worker_pb2.Adopt) -> None:
        """Decide on a target's request; a newer one for the same stream supersedes a pending one."""
        self._refuse_pending(adopt.handle, "superseded by another migration")
        self._decide(target, adopt)

    def check_pending(self) -> None:
        """Decide pending adoptions again after tokens were accepted or streams ended."""
        for handle, pending in list(self._pending.items()):
            stream = self._table.get(handle)
            if not isinstance(evaluate(self._table, stream, pending.target, pending.adopt), Wait):
                self._pop_pending(handle)
                self._decide(pending.target, pending.adopt)

    def target_lost(self, target: str) -> None:
        """Drop the adoptions that an instance waits for: its imports end with its stream, even if it is back
        before the tokens arrive."""
        for handle, pending in list(self._pending.items()):
            if pending.target == target:
                self._pop_pending(handle)

    def answer_ownership_query(self, source: str, query: worker_pb2.OwnershipQuery) -> None:
        """Answer a source whose export broke; if it may continue, refuse the pending adoption so that it
        cannot win later."""
        stream = self._table.get(query.handle)
        current = stream is not None and stream.owner == source and stream.epoch == query.epoch
        if current:
            self._refuse_pending(query.handle, "the source continues")
        ownership = worker_pb2.Ownership(handle=query.handle, epoch=query.epoch, current=current)
        self._outbox.send(source, worker_pb2.AttachUp(ownership=ownership))

    def close(self) -> None:
        """Cancel the timers."""
        for handle in list(self._pending):
            self._pop_pending(handle)

    def _decide(self, target: str, adopt: worker_pb2.Adopt) -> None:
        stream = self._table.get(adopt.handle)
        verdict = evaluate(self._table, stream, target, adopt)
        match verdict:
            case RefuseAdoption(reason):
                self._reply(target, adopt, reason)
            case Wait(missing):
                reason = f"{missing} tokens of the source did not arrive within {IN_FLIGHT_S:g} s"
                timer = asyncio.get_running_loop().call_later(
                    IN_FLIGHT_S, self._refuse_pending, adopt.handle, reason
                )
                self._pending[adopt.handle] = _Pending(target, adopt, timer)
            case Commit(source):
                assert stream is not None
                if stream.model and not self._may_run(target, stream.model):
                    # The scheduler and the target should have refused before; this is the last check against
                    # an answer of two models.
                    self._reply(target, adopt, "the target runs another model than made the tokens so far")
                    return
                self._commit(stream, source, target, adopt)

    def _commit(self, stream: Stream, source: str, target: str, adopt: worker_pb2.Adopt) -> None:
        # If the target cannot be notified, no engine would run the request: then it stays with the source.
        accepted = worker_pb2.AdoptReply(migration_id=adopt.migration_id, handle=adopt.handle, accepted=True)
        if not self._outbox.send(target, worker_pb2.AttachUp(adopt_reply=accepted)):
            return
        old_epoch = stream.epoch
        self._table.hand_over(stream, target, adopt.epoch)
        release = worker_pb2.Release(handle=stream.handle, epoch=old_epoch)
        self._outbox.send(source, worker_pb2.AttachUp(release=release))
        self._on_commit(stream, source, target)

    def _refuse_pending(self, handle: int, reason: str) -> None:
        pending = self._pop_pending(handle)
        if pending is not None:
            self._reply(pending.target, pending.adopt, reason)

    def _reply(self, target: str, adopt: worker_pb2.Adopt, reason: str) -> None:
        reply = worker_pb2.AdoptReply(
            migration_id=adopt.migration_id,
            handle=adopt.handle,
            accepted=False,
            reason=reason,
            gone=self._table.get(adopt.handle) is None,
        )
        self._outbox.send(target, worker_pb2.AttachUp(adopt_reply=reply))

    def _pop_pending(self, handle: int) -> _Pending | None:
        pending = self._pending.pop(handle, None)
        if pending is not None:
            pending.timer.cancel()
        return pending
