"""Keeps a second front end in step with the answers that are served here.

What an answer gets is told to its client once the second front end has it: so no client ever has anything
that would be lost with this front end. There is one call at a time to each front end; what comes while it is
under way goes together in the next. If the second front end does not answer, another one gets a copy; until
that has the log so far, and where there is no other one, answers go on without.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from frontend_svc.answers.book import Answer, AnswerBook, Refused
from frontend_svc.answers.messages import part_message, refused_of
from frontend_svc.answers.peers import CallFailed, Peer, Unanswered
from tailrace.service.tasks import task_error
from tailrace.v1 import answers_pb2

log = logging.getLogger(__name__)

# Of a call; one answer alone may be more.
_BATCH_BYTES: Final = 1 << 20


class SecondFrontEnds(Protocol):
    """The part of peers.Peers that is used here."""

    def all(self) -> list[Peer]: ...
    def second(self, name: str, prefer: str = "") -> Peer | None: ...
    async def keep(self, peer: Peer, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply: ...


@dataclass(slots=True)
class _Copied:
    """How far the second front end is with one answer."""

    answer: Answer
    peer: Peer
    # New entries wait for it. They do not wait for a copy that replaces a lost one, or none, before that has
    # the log as it was when it was begun: until then it protects no more than none would.
    holds: bool = True
    has_head: bool = False
    entries: int = 0
    # It knows of the end.
    complete: bool = False
    # It does not take it: the answer goes on without a copy.
    refused: bool = False
    # When it was last told anything; seconds.
    told_s: float = 0.0


@dataclass(slots=True)
class _Line:
    """What goes to one front end."""

    peer: Peer
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    # Answers that it is behind with, in the order in which that began.
    behind: dict[str, _Copied] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)


class Replication:
    """All copies of what is served here."""

    def __init__(
        self,
        frontend_id: str,
        book: AnswerBook,
        peers: SecondFrontEnds,
        on_released: Callable[[Answer, int], None],
        on_superseded: Callable[[Answer], None],
        on_called: Callable[[float], None],
        remind_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_released(answer, entries)`: so many entries may be told. `on_superseded` is told of one that
        somebody else serves by now, `on_called` of each call's seconds. After `remind_s` seconds without news
        the second front end is told that an answer is still served. `clock`: seconds."""
        self._frontend_id = frontend_id
        self._book = book
        self._peers = peers
        self._on_released = on_released
        self._on_superseded = on_superseded
        self._on_called = on_called
        self._remind_s = remind_s
        self._clock = clock
        self._copied: dict[str, _Copied] = {}
        self._lines: dict[str, _Line] = {}
        # Resolved when the second front end has an answer's head; False: its key is in use there.
        self._settling: dict[str, asyncio.Future[bool]] = {}
        # Front ends that did not answer, while they had copies.
        self.lost = 0

    def copied_to(self, answer: Answer) -> str:
        """Which front end has a copy, or is getting one; empty: none."""
        copied = self._copied.get(answer.head.answer_id)
        return "" if copied is None else copied.peer.frontend_id

    def uncopied(self) -> int:
        """Answers that go on here and whose clients may have what no second front end has."""
        return sum(
            answer.serves and not answer.complete and not self._protects(answer.head.answer_id)
            for answer in self._book
        )

    def begin(self, answer: Answer, prefer: str = "", has: int | None = None) -> None:
        """A run begins here. `prefer`: who should have the copy; `has`: it has so many entries already."""
        self.stop(answer)
        peer = None if answer.gone else self._peers.second(_name(answer), prefer)
        if peer is None:
            self._on_released(answer, len(answer.entries))
            return
        copied = self._copied[answer.head.answer_id] = _Copied(answer, peer)
        # A client that comes back tells the number of its run: nobody gets an event of this one before the
        # second front end knows of it.
        if has is not None and peer.frontend_id == prefer:
            copied.has_head, copied.entries = True, has
            self._on_released(answer, has)
        self._push(copied)

    async def settle(self, answer: Answer) -> bool:
        """Wait until the second front end has the answer; False: its key is in use there."""
        copied = self._copied.get(answer.head.answer_id)
        if copied is None or copied.has_head:
            return True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._settling[answer.head.answer_id] = future
        return await future

    def appended(self, answer: Answer) -> None:
        """The answer's log, or what is known of it, has changed."""
        copied = self._copied.get(answer.head.answer_id)
        if copied is None or copied.refused or not copied.holds:
            self._on_released(answer, len(answer.entries))
        if copied is not None and not copied.refused:
            self._push(copied)

    def stop(self, answer: Answer) -> None:
        """It is not served here any more; the copy stays where it is."""
        copied = self._copied.pop(answer.head.answer_id, None)
        if copied is not None and (line := self._lines.get(copied.peer.incarnation)) is not None:
            line.behind.pop(answer.head.answer_id, None)
        self._settled(answer.head.answer_id, True)

    def forget(self, answer: Answer) -> None:
        """Nobody needs it any more, nor its copy."""
        copied = self._copied.get(answer.head.answer_id)
        self.stop(answer)
        if copied is not None:
            line = self._line(copied.peer)
            line.forgotten.append(answer.head.answer_id)
            line.wake.set()

    def tick(self) -> None:
        """Called every half second: answers without a copy get one where there is a front end for it."""
        known = {peer.incarnation for peer in self._peers.all()}
        for line in list(self._lines.values()):
            if line.peer.incarnation not in known:
                self._lose(line)
        now_s = self._clock()
        for copied in list(self._copied.values()):
            if copied.answer.gone:
                # It had to make room here. The copy may stay where it is.
                self.stop(copied.answer)
            elif copied.answer.running and not copied.refused and now_s - copied.told_s > self._remind_s:
                self._push(copied)
        if known:
            for answer in self._book:
                if answer.serves and not answer.complete and answer.head.answer_id not in self._copied:
                    self._copy_anew(answer)

    async def close(self) -> None:
        """End all calls."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        self._lines.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer_id in list(self._settling):
            self._settled(answer_id, True)

    # ---- one front end

    def _line(self, peer: Peer) -> _Line:
        line = self._lines.get(peer.incarnation)
        if line is None:
            line = self._lines[peer.incarnation] = _Line(peer)
            line.task = asyncio.create_task(self._feed(line), name=f"copies to {peer.frontend_id}")
            line.task.add_done_callback(partial(self._ended, line))
        return line

    def _protects(self, answer_id: str) -> bool:
        copied = self._copied.get(answer_id)
        return copied is not None and copied.holds and not copied.refused

    def _push(self, copied: _Copied) -> None:
        line = self._line(copied.peer)
        line.behind[copied.answer.head.answer_id] = copied
        line.wake.set()

    async def _feed(self, line: _Line) -> None:
        while True:
            await line.wake.wait()
            line.wake.clear()
            while line.behind or line.forgotten:
                if not await self._send(line):
                    return

    async def _send(self, line: _Line) -> bool:
        """Whether the front end is there."""
        request = answers_pb2.KeepRequest(frontend_id=self._frontend_id, forgotten=line.forgotten)
        line.forgotten.clear()
        sent: list[tuple[_Copied, int, bool]] = []
        size = 0
        while line.behind and size < _BATCH_BYTES:
            answer_id = next(iter(line.behind))
            copied = line.behind.pop(answer_id)
            message = part_message(
                self._book.part(copied.answer, copied.entries, with_head=not copied.has_head)
            )
            request.parts.append(message)
            size += message.ByteSize()
            sent.append((copied, len(copied.answer.entries), copied.answer.complete))
        began_s = self._clock()
        try:
            reply = await self._peers.keep(line.peer, request)
        except Unanswered:
            self._lose(line)
            return False
        except CallFailed:
            for copied, _, _ in sent:
                self._go_on_without(copied)
            return True
        self._on_called(self._clock() - began_s)
        refused = {each.answer_id: refused_of(each.reason) for each in reply.refused}
        for copied, entries, complete in sent:
            self._acknowledge(copied, entries, complete, refused.get(copied.answer.head.answer_id))
        return True

    def _acknowledge(self, copied: _Copied, entries: int, complete: bool, refused: Refused | None) -> None:
        answer = copied.answer
        answer_id = answer.head.answer_id
        if self._copied.get(answer_id) is not copied:
            return
        match refused:
            case None:
                copied.has_head, copied.entries, copied.complete = True, entries, complete
                copied.holds = True
                copied.told_s = self._clock()
                self._settled(answer_id, True)
                self._on_released(answer, entries)
            case Refused.SUPERSEDED:
                self.stop(answer)
                self._on_superseded(answer)
            case Refused.GAP:
                copied.has_head, copied.entries, copied.complete = False, 0, False
                self._push(copied)
            case Refused.KEY_IN_USE if self._settled(answer_id, False):
                del self._copied[answer_id]
            case Refused.KEY_IN_USE | Refused.FULL:
                log.info("front end %s takes no copy of %s", copied.peer.frontend_id, answer_id)
                self._go_on_without(copied)

    def _go_on_without(self, copied: _Copied) -> None:
        """The front end is there, but does not take the answer."""
        answer = copied.answer
        if self._copied.get(answer.head.answer_id) is not copied:
            return
        copied.refused = True
        self._settled(answer.head.answer_id, True)
        self._on_released(answer, len(answer.entries))

    def _copy_anew(self, answer: Answer) -> None:
        """Have another front end copy an answer whose run has gone on without a copy."""
        peer = self._peers.second(_name(answer))
        if peer is None:
            return
        copied = self._copied[answer.head.answer_id] = _Copied(answer, peer, holds=False)
        self._push(copied)

    def _lose(self, line: _Line) -> None:
        """The front end does not answer: its answers get a copy elsewhere."""
        if self._lines.get(line.peer.incarnation) is not line:
            return
        self.lost += 1
        del self._lines[line.peer.incarnation]
        if line.task is not None and line.task is not asyncio.current_task():
            line.task.cancel()
        for copied in [each for each in self._copied.values() if each.peer == line.peer]:
            answer = copied.answer
            self._copied.pop(answer.head.answer_id)
            self._settled(answer.head.answer_id, True)
            self._on_released(answer, len(answer.entries))
            if not answer.complete and not answer.gone:
                self._copy_anew(answer)

    def _ended(self, line: _Line, task: asyncio.Task[None]) -> None:
        if (error := task_error(task)) is not None:
            log.error("copying to %s failed", line.peer.frontend_id, exc_info=error)
            self._lose(line)

    def _settled(self, answer_id: str, fine: bool) -> bool:
        """Whether anybody waited for it."""
        future = self._settling.pop(answer_id, None)
        if future is None:
            return False
        if not future.done():
            future.set_result(fine)
        return True


def _name(answer: Answer) -> str:
    """By what its second front end is drawn: its key, so that two front ends that are given one key at the
    same time ask the same third one whether it is free."""
    return answer.head.key or answer.head.answer_id
