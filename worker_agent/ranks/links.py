"""A worker's end of the talk with the ranks of its engine.

The ranks come over a Unix socket in a folder of this process's own, which is gone when all are there. A rank
whose connection ends without having been told to stop has died, and the engine with it. So has one that is
there and answers no more (it was stopped, or its device holds it for ever): each is asked every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from worker_agent.kv.address import KvTransferError
from worker_agent.ranks.messages import (
    ERRORS,
    Answer,
    Answered,
    Asked,
    Command,
    Done,
    Failed,
    Hello,
    Ping,
    Stop,
    encode,
    read_frame,
)

log = logging.getLogger(__name__)

_A = TypeVar("_A", bound=Answer)

_SECRET_BYTES: Final = 32
_HELLO_S: Final = 30.0
_STOP_S: Final = 5.0
# For an answer to a command that waits for no other worker.
COMMAND_S: Final = 30.0


# This process itself may have stood still for as long as it likes: one answer that is late says nothing.
_MISSED_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds between an answer of a rank and the next question, and for which one is waited."""

    every_s: float = 5.0
    patience_s: float = 10.0


class RankLost(KvTransferError):
    """A rank of this worker's own engine is gone, and the engine will be."""


class RankLink:
    """The connection to one rank."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self._reader = reader
        self._writer = writer
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        # Its connection has ended.
        self.lost = False

    async def ask(self, command: Command, kind: type[_A], seconds: float | None = COMMAND_S) -> _A:
        """The rank's answer, which must be of this kind. `seconds` None: the caller sets the deadline.

        Raises RankLost, and what the rank says is wrong.
        """
        if self.lost:
            raise RankLost(f"rank {self.rank} is gone")
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(encode(Asked(number, command)))
        try:
            async with asyncio.timeout(seconds):
                answer = await future
        except TimeoutError:
            raise RankLost(f"rank {self.rank} did not answer within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, Failed):
            raise ERRORS[answer.kind](f"rank {self.rank}: {answer.reason}")
        if not isinstance(answer, kind):
            raise RankLost(f"rank {self.rank} gave another answer than was asked for")
        return answer

    async def silent(self, pulse: Pulse) -> None:
        """Until the rank is gone, or has left two questions in a row unanswered."""
        missed = 0
        while missed < _MISSED_MAX and not self.lost:
            if not missed:
                await asyncio.sleep(pulse.every_s)
            try:
                await self.ask(Ping(), Done, pulse.patience_s)
                missed = 0
            except RankLost:
                missed += 1

    async def listen(self) -> None:
        """Take answers until the connection ends."""
        decoder = msgspec.msgpack.Decoder(Answered)
        try:
            while True:
                answered = decoder.decode(await read_frame(self._reader))
                future = self._waiting.get(answered.number)
                if future is not None and not future.done():
                    future.set_result(answered.answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.lost = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RankLost(f"rank {self.rank} is gone"))
            self._writer.close()


class RankLinks:
    """The connections to all ranks of an engine, in their order."""

    def __init__(self, number: int, on_lost: Callable[[int, str], None], pulse: Pulse | None = None) -> None:
        """`on_lost` is told once, of the first rank that dies or answers no more, and which of the two."""
        self._number = number
        self._pulse = pulse or Pulse()
        self._on_lost = on_lost
        self._folder = tempfile.mkdtemp(prefix="tailrace-ranks-")
        self.path = os.path.join(self._folder, "worker")
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._found: dict[int, RankLink] = {}
        self._complete = asyncio.Event()
        self._listening: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []
        self._over = False

    def __iter__(self) -> Iterator[RankLink]:
        return iter([self._found[rank] for rank in sorted(self._found)])

    def __len__(self) -> int:
        return self._number

    async def open(self) -> None:
        """Let ranks in from now on."""
        self._server = await asyncio.start_unix_server(self._arrived, self.path)

    async def all_here(self, seconds: float) -> None:
        """Until every rank has come; nobody else can any more. Raises RuntimeError."""
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(self._number)) - self._found.keys())
            raise RuntimeError(f"ranks {missing} did not report within {seconds:g} s") from None
        finally:
            self._no_more()

    def watch(self) -> None:
        """Ask every rank from now on whether it is there. Once; when all have begun their transfers."""
        for link in self:
            watching = asyncio.create_task(self._watch(link), name=f"pulse of rank {link.rank}")
            self._watching.append(watching)

    async def stop(self) -> None:
        """Tell the ranks to end their transfers, and leave them. May be called again."""
        self._over = True
        self._no_more()
        asked = [link.ask(Stop(), Done, _STOP_S) for link in self]
        for told in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(told, BaseException) and not isinstance(told, KvTransferError):
                raise told
        tasks = [*self._watching, *self._listening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _no_more(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello: Hello | None = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError, ValueError):
            async with asyncio.timeout(_HELLO_S):
                hello = msgspec.msgpack.decode(await read_frame(reader), type=Hello)
        known = hello is not None and secrets.compare_digest(hello.secret, self.secret)
        if hello is None or not known or hello.rank in self._found or hello.rank >= self._number:
            log.warning("somebody who is no rank came to the ranks' socket")
            writer.close()
            return
        link = RankLink(hello.rank, reader, writer)
        self._found[hello.rank] = link
        self._listening.append(asyncio.create_task(self._listen(link), name=f"rank {hello.rank}"))
        if len(self._found) == self._number:
            self._complete.set()

    async def _listen(self, link: RankLink) -> None:
        await link.listen()
        self._lose(link, "is gone")

    async def _watch(self, link: RankLink) -> None:
        await link.silent(self._pulse)
        self._lose(link, "is gone" if link.lost else "answers no more")

    def _lose(self, link: RankLink, what: str) -> None:
        if not self._over:
            self._over = True
            self._on_lost(link.rank, what)
