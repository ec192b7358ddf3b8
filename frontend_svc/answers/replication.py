"""Copy the answers that are served here to a second front end.

An entry is delivered to its client only once the second front end has it, so no client ever has anything that
would be lost with this front end. There is one call at a time per front end; entries that arrive meanwhile
share the next one. If the second front end does not answer, another one gets a copy. Until that copy is
complete, and if there is no other front end, answers are delivered without one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from frontend_svc.answers.peers import (
    AnswerPeers,
    Peer,
    PeerCallFailed,
    PeerSilent,
    PeerUnreachable,
    decode_refusal,
    encode_part,
)
from frontend_svc.answers.store import AnswerStore, KeptAnswer, PartRefusal
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import answers_pb2

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("copies of answers")
# Target size of a call; a single answer may exceed it.
_BATCH_BYTES: Final = 1 << 20
# A front end that hears neither its peer nor any instance for this long continues without a copy.
_ALONE_S: Final = 5.0


@dataclass(slots=True)
class _Copy:
    """What the second front end has of one answer."""

    answer: KeptAnswer
    peer: Peer
    # Whether delivery waits for this copy. A copy that replaces a lost one (or none) is of no use before it
    # has all that was in the log when copying began, so until then delivery does not wait for it.
    blocks_delivery: bool = True
    has_head: bool = False
    entries: int = 0
    # It refused the copy; the answer is delivered without one.
    refused: bool = False
    # When it was last sent anything, in seconds.
    last_sent_s: float = 0.0


@dataclass(slots=True)
class _PeerQueue:
    """What has to be sent to one front end."""

    peer: Peer
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    # Answers of which it lacks entries, oldest first.
    pending: dict[str, _Copy] = field(default_factory=dict)
    # Ids of answers whose copies it has to remove; see `discard`.
    forgotten: dict[str, asyncio.Event] = field(default_factory=dict)


class Replication:
    """Maintain the copies of all answers served here."""

    def __init__(
        self,
        frontend_id: str,
        store: AnswerStore,
        peers: AnswerPeers,
        on_released: Callable[[KeptAnswer, int], None],
        on_superseded: Callable[[KeptAnswer], None],
        on_called: Callable[[float], None],
        keepalive_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Copy through `peers`.

        `on_released(answer, entries)` is called when that many entries may be delivered,
        `on_superseded(answer)` when another front end serves the answer by now, and `on_called(seconds)`
        after each call. An answer without news is sent again after `keepalive_s` seconds, so that its copy
        does not expire. `clock`: seconds.
        """
        self._frontend_id = frontend_id
        self._store = store
        self._peers = peers
        self._on_released = on_released
        self._on_superseded = on_superseded
        self._on_called = on_called
        self._keepalive_s = keepalive_s
        self._clock = clock
        self._copies: dict[str, _Copy] = {}
        self._queues: dict[str, _PeerQueue] = {}
        # Resolved once the second front end has an answer's head; False: its key is in use there.
        self._key_checks: dict[str, asyncio.Future[bool]] = {}
        # Since when it may be this front end that receives nothing, while its clients still receive from it:
        # if they then resume elsewhere, they must not have entries that are only here.
        self._deaf_since_s: float | None = None
        # Number of times a front end that held copies did not answer.
        self.peers_lost = 0

    def copied_to(self, answer: KeptAnswer) -> str:
        """Return the front end that has or is getting a copy; empty if none."""
        copy = self._copies.get(answer.head.answer_id)
        return "" if copy is None else copy.peer.frontend_id

    def count_unprotected(self) -> int:
        """Count answers in progress here whose clients may have entries that no second front end has."""
        return sum(
            answer.served_here and not answer.complete and not self._is_protected(answer.head.answer_id)
            for answer in self._store
        )

    def begin(self, answer: KeptAnswer, prefer: str = "", replica_entries: int | None = None) -> None:
        """Begin to copy a run that begins here.

        `prefer`: the front end that should have the copy; `replica_entries`: how many entries it has already.
        """
        self.stop(answer)
        peer = None if answer.removed else self._peers.choose_replica(_replica_key(answer), prefer)
        if peer is None:
            self._release_unprotected(answer)
            return
        copy = self._copies[answer.head.answer_id] = _Copy(answer, peer)
        # A resuming client sends the number of its run, so no event of this run may be delivered before the
        # second front end knows the run.
        if replica_entries is not None and peer.frontend_id == prefer:
            copy.has_head, copy.entries = True, replica_entries
            self._on_released(answer, replica_entries)
        self._enqueue(copy)

    async def confirm_key(self, answer: KeptAnswer) -> bool:
        """Wait until the second front end has the answer; return False if its key is in use there."""
        copy = self._copies.get(answer.head.answer_id)
        if copy is None or copy.has_head:
            return True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._key_checks[answer.head.answer_id] = future
        return await future

    def appended(self, answer: KeptAnswer) -> None:
        """Copy entries or a state that were added to the answer."""
        copy = self._copies.get(answer.head.answer_id)
        if copy is None or copy.refused or not copy.blocks_delivery:
            self._release_unprotected(answer)
        if copy is not None and not copy.refused:
            self._enqueue(copy)

    def instance_heard(self) -> None:
        """Note that an instance was heard, so this front end is not the one that receives nothing."""
        if self._deaf_since_s is not None:
            self._release_held()

    def stop(self, answer: KeptAnswer) -> None:
        """Stop copying an answer that is not served here any more; the copy stays where it is."""
        copy = self._copies.pop(answer.head.answer_id, None)
        if copy is not None and (queue := self._queues.get(copy.peer.incarnation)) is not None:
            queue.pending.pop(answer.head.answer_id, None)
        self._resolve_key_check(answer.head.answer_id, True)

    def discard(self, answer: KeptAnswer) -> asyncio.Event:
        """Stop copying an answer that was removed, and remove its copy.

        Return an event that is set once there is no copy, its front end is lost, or the call has failed.
        """
        copy = self._copies.get(answer.head.answer_id)
        self.stop(answer)
        gone = asyncio.Event()
        if copy is None:
            gone.set()
        else:
            queue = self._queue_for(copy.peer)
            queue.forgotten[answer.head.answer_id] = gone
            queue.wake.set()
        return gone

    def tick(self) -> None:
        """Start copies of answers without one, if a front end is available. Called every half second."""
        known = {peer.incarnation for peer in self._peers.reachable()}
        for queue in list(self._queues.values()):
            if queue.peer.incarnation not in known:
                self._drop_peer(queue)
        now_s = self._clock()
        if self._deaf_since_s is not None and now_s - self._deaf_since_s > _ALONE_S:
            self._release_held()
        for copy in list(self._copies.values()):
            if copy.answer.removed:
                # Removed here to make room; the copy may stay.
                self.stop(copy.answer)
            elif (
                copy.answer.client_connected
                and not copy.refused
                and now_s - copy.last_sent_s > self._keepalive_s
            ):
                self._enqueue(copy)
        if known:
            for answer in self._store:
                if answer.served_here and not answer.complete and answer.head.answer_id not in self._copies:
                    self._start_new_copy(answer)

    async def close(self) -> None:
        """Cancel all calls."""
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for queue in self._queues.values():
            _set_all(queue.forgotten)
        self._queues.clear()
        await cancel(*tasks)
        for answer_id in list(self._key_checks):
            self._resolve_key_check(answer_id, True)

    # ---- one front end

    def _queue_for(self, peer: Peer) -> _PeerQueue:
        queue = self._queues.get(peer.incarnation)
        if queue is None:
            queue = self._queues[peer.incarnation] = _PeerQueue(peer)
            queue.task = asyncio.create_task(self._run_queue(queue), name=f"copies to {peer.frontend_id}")
            queue.task.add_done_callback(partial(self._queue_ended, queue))
        return queue

    def _is_protected(self, answer_id: str) -> bool:
        copy = self._copies.get(answer_id)
        return copy is not None and copy.blocks_delivery and not copy.refused

    def _enqueue(self, copy: _Copy) -> None:
        queue = self._queue_for(copy.peer)
        queue.pending[copy.answer.head.answer_id] = copy
        queue.wake.set()

    async def _run_queue(self, queue: _PeerQueue) -> None:
        while True:
            await queue.wake.wait()
            queue.wake.clear()
            while queue.pending or queue.forgotten:
                if not await self._send(queue):
                    return

    async def _send(self, queue: _PeerQueue) -> bool:
        """Send one batch; return False if the front end cannot be reached."""
        forgotten, queue.forgotten = queue.forgotten, {}
        try:
            return await self._send_batch(queue, forgotten)
        finally:
            _set_all(forgotten)

    async def _send_batch(self, queue: _PeerQueue, forgotten: Iterable[str]) -> bool:
        request = answers_pb2.KeepRequest(frontend_id=self._frontend_id, forgotten=forgotten)
        sent: list[tuple[_Copy, int]] = []
        size = 0
        while queue.pending and size < _BATCH_BYTES:
            answer_id = next(iter(queue.pending))
            copy = queue.pending.pop(answer_id)
            message = encode_part(
                self._store.part_from(copy.answer, copy.entries, with_head=not copy.has_head)
            )
            request.parts.append(message)
            size += message.ByteSize()
            sent.append((copy, len(copy.answer.entries)))
        began_s = self._clock()
        try:
            reply = await self._peers.keep(queue.peer, request)
        except PeerSilent:
            # From the first one on: a peer that is silent again and again must not hold entries for longer.
            if self._deaf_since_s is None:
                self._deaf_since_s = self._clock()
            self._drop_peer(queue)
            return False
        except PeerUnreachable:
            self._drop_peer(queue)
            return False
        except PeerCallFailed:
            for copy, _ in sent:
                self._continue_without_copy(copy)
            return True
        self._on_called(self._clock() - began_s)
        refused = {refusal.answer_id: decode_refusal(refusal.reason) for refusal in reply.refused}
        for copy, entries in sent:
            self._acknowledge(copy, entries, refused.get(copy.answer.head.answer_id))
        return True

    def _acknowledge(self, copy: _Copy, entries: int, refused: PartRefusal | None) -> None:
        answer = copy.answer
        answer_id = answer.head.answer_id
        if self._copies.get(answer_id) is not copy:
            return
        match refused:
            case None:
                copy.has_head, copy.entries = True, entries
                copy.blocks_delivery = True
                copy.last_sent_s = self._clock()
                self._resolve_key_check(answer_id, True)
                self._on_released(answer, entries)
            case PartRefusal.SUPERSEDED:
                self.stop(answer)
                self._on_superseded(answer)
            case PartRefusal.GAP:
                copy.has_head, copy.entries = False, 0
                self._enqueue(copy)
            case PartRefusal.KEY_IN_USE if self._resolve_key_check(answer_id, False):
                del self._copies[answer_id]
            case PartRefusal.KEY_IN_USE | PartRefusal.FULL:
                log.info("front end %s takes no copy of %s", copy.peer.frontend_id, answer_id)
                self._continue_without_copy(copy)

    def _continue_without_copy(self, copy: _Copy) -> None:
        """Deliver an answer without a copy: the front end is reachable but does not accept it."""
        answer = copy.answer
        if self._copies.get(answer.head.answer_id) is not copy:
            return
        copy.refused = True
        self._resolve_key_check(answer.head.answer_id, True)
        self._release_unprotected(answer)

    def _start_new_copy(self, answer: KeptAnswer) -> None:
        """Copy an answer to another front end while its run continues without a copy."""
        peer = self._peers.choose_replica(_replica_key(answer))
        if peer is None:
            return
        copy = self._copies[answer.head.answer_id] = _Copy(answer, peer, blocks_delivery=False)
        self._enqueue(copy)

    def _drop_peer(self, queue: _PeerQueue) -> None:
        """Stop using a front end that does not answer, and copy its answers to others."""
        if self._queues.get(queue.peer.incarnation) is not queue:
            return
        self.peers_lost += 1
        del self._queues[queue.peer.incarnation]
        _set_all(queue.forgotten)
        if queue.task is not None and queue.task is not asyncio.current_task():
            queue.task.cancel()
        for copy in [each for each in self._copies.values() if each.peer == queue.peer]:
            answer = copy.answer
            self._copies.pop(answer.head.answer_id)
            self._resolve_key_check(answer.head.answer_id, True)
            self._release_unprotected(answer)
            if not answer.complete and not answer.removed:
                self._start_new_copy(answer)

    def _release_unprotected(self, answer: KeptAnswer) -> None:
        """Deliver entries that no second front end has, unless this one may be the one that is cut off."""
        if self._deaf_since_s is None:
            self._on_released(answer, len(answer.entries))

    def _release_held(self) -> None:
        """Deliver all entries that were held because this front end might be the one that is cut off."""
        self._deaf_since_s = None
        for answer in self._store:
            if answer.served_here and not self._is_protected(answer.head.answer_id):
                self._release_unprotected(answer)

    def _queue_ended(self, queue: _PeerQueue, task: asyncio.Task[None]) -> None:
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, queue.peer.frontend_id, error)
            self._drop_peer(queue)

    def _resolve_key_check(self, answer_id: str, confirmed: bool) -> bool:
        """Resolve the key check of an answer; return whether any call waited for it."""
        future = self._key_checks.pop(answer_id, None)
        if future is None:
            return False
        if not future.done():
            future.set_result(confirmed)
        return True


def _set_all(events: Mapping[str, asyncio.Event]) -> None:
    for event in events.values():
        event.set()


def _replica_key(answer: KeptAnswer) -> str:
    """Return the key by which an answer's second front end is chosen.

    It is the idempotency key if there is one, so that two front ends that are given one key at the same time
    ask the same third one whether it is free.
    """
    return answer.head.key or answer.head.answer_id
