"""The worker's connections to the ranks of its engine.

The ranks connect to a Unix socket in a private folder, which is removed once all are connected. A rank whose
connection ends before it was sent Stop has died, and the engine with it. A rank that stays connected but
stops answering (it was stopped, or its device hangs) counts as dead too, so each is pinged every few seconds.
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
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tailrace.service.sockets import unix_path
from tailrace.service.tasks import cancel, supervise
from tailrace.telemetry.incidents import unreadable
from worker_agent.kv.address import KvTransferError
from worker_agent.parallel.rank_leftovers import SOCKETS
from worker_agent.parallel.rank_messages import (
    ERRORS,
    Command,
    Done,
    Failed,
    Hello,
    NumberedAnswer,
    NumberedCommand,
    Ping,
    RankAnswer,
    Stop,
    encode,
    read_frame,
)

log = logging.getLogger(__name__)

_A = TypeVar("_A", bound=RankAnswer)

_SECRET_BYTES: Final = 32
_HELLO_S: Final = 30.0
_STOP_S: Final = 5.0
# For the answer to a command that does not wait for another worker.
COMMAND_S: Final = 30.0


# This process itself may have been paused, so a single late answer proves nothing.
_MISSED_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class Pulse:
    """Ping period and timeout, in seconds; the period runs from one answer to the next ping."""

    every_s: float = 5.0
    timeout_s: float = 10.0


class RankLost(KvTransferError):
    """A rank of this worker's own engine has died or hangs; the engine cannot go on."""


class RankLink:
    """The connection to one rank."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self._reader = reader
        self._writer = writer
        self._last_number = 0
        self._pending: dict[int, asyncio.Future[RankAnswer]] = {}
        # Whether the connection has ended.
        self.lost = False

    async def ask(self, command: Command, kind: type[_A], seconds: float | None = COMMAND_S) -> _A:
        """Send a command and return the rank's answer, which must be of type `kind`.

        `seconds`: the timeout; None leaves the deadline to the caller. Raise RankLost, and the error that
        the rank reported.
        """
        if self.lost:
            raise RankLost(f"rank {self.rank} is gone")
        self._last_number += 1
        number = self._last_number
        future: asyncio.Future[RankAnswer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._writer.write(encode(NumberedCommand(number, command)))
        try:
            async with asyncio.timeout(seconds):
                answer = await future
        except TimeoutError:
            raise RankLost(f"rank {self.rank} did not answer within {seconds:g} s") from None
        finally:
            self._pending.pop(number, None)
            # It keeps an error, whose frames have it.
            del future
        if isinstance(answer, Failed):
            raise ERRORS[answer.kind](f"rank {self.rank}: {answer.reason}")
        if not isinstance(answer, kind):
            raise RankLost(f"rank {self.rank} gave an unexpected answer")
        return answer

    async def wait_until_silent(self, pulse: Pulse) -> None:
        """Return once the rank is gone, or has missed two pings in a row."""
        missed = 0
        while missed < _MISSED_MAX and not self.lost:
            if not missed:
                await asyncio.sleep(pulse.every_s)
            try:
                await self.ask(Ping(), Done, pulse.timeout_s)
                missed = 0
            except RankLost:
                missed += 1

    async def listen(self) -> None:
        """Dispatch answers to their callers until the connection ends, or something else arrives."""
        if self.lost:
            return
        decoder = msgspec.msgpack.Decoder(NumberedAnswer)
        try:
            while True:
                answered = decoder.decode(await read_frame(self._reader))
                future = self._pending.get(answered.number)
                if future is not None and not future.done():
                    future.set_result(answered.answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError as error:
            # It is unknown which command is not answered, so the rank counts as gone.
            unreadable("answer of a rank", f"rank {self.rank}", error)
        finally:
            self.lost = True
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(RankLost(f"rank {self.rank} is gone"))
            self._writer.close()


class RankLinks:
    """The connections to all ranks of an engine; iterates in rank order."""

    def __init__(self, number: int, on_lost: Callable[[int, str], None], pulse: Pulse | None = None) -> None:
        """`on_lost` is called once, with the first rank that dies or hangs and a description of which."""
        self._number = number
        self._pulse = pulse or Pulse()
        self._on_lost = on_lost
        self._folder = tempfile.mkdtemp(prefix="tailrace-ranks-", dir=os.environ.get(SOCKETS))
        self.path = os.path.join(self._folder, "worker")
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._links: dict[int, RankLink] = {}
        self._complete = asyncio.Event()
        self._listening: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []
        self._stopped = False

    def __iter__(self) -> Iterator[RankLink]:
        return iter([self._links[rank] for rank in sorted(self._links)])

    def __len__(self) -> int:
        return self._number

    async def open(self) -> None:
        """Start accepting ranks. Raise OSError."""
        path = unix_path(Path(self._folder), "worker")
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def wait_for_all(self, seconds: float) -> None:
        """Wait until every rank has connected, then stop accepting. Raise RuntimeError after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(self._number)) - self._links.keys())
            raise RuntimeError(f"ranks {missing} did not report within {seconds:g} s") from None
        finally:
            self._stop_accepting()

    def watch(self) -> None:
        """Start pinging every rank. Call once, when all have started their transports."""
        for link in self:
            watching = supervise("pulses of ranks", partial(self._watch, link), f"rank {link.rank}")
            self._watching.append(watching)

    async def stop(self) -> None:
        """Make the ranks end their transfers, and disconnect. Idempotent."""
        self._stopped = True
        self._stop_accepting()
        calls = [link.ask(Stop(), Done, _STOP_S) for link in self]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, KvTransferError):
                raise result
        await cancel(*self._watching, *self._listening)

    def _stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello: Hello | None = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError, ValueError):
            async with asyncio.timeout(_HELLO_S):
                hello = msgspec.msgpack.decode(await read_frame(reader), type=Hello)
        known = hello is not None and secrets.compare_digest(hello.secret, self.secret)
        if hello is None or not known or hello.rank in self._links or not 0 <= hello.rank < self._number:
            log.warning("a process that is not a rank connected to the ranks' socket")
            writer.close()
            return
        link = RankLink(hello.rank, reader, writer)
        self._links[hello.rank] = link
        self._listening.append(
            supervise("answers of ranks", partial(self._listen, link), f"rank {hello.rank}")
        )
        if len(self._links) == self._number:
            self._complete.set()

    async def _listen(self, link: RankLink) -> None:
        await link.listen()
        self._report_lost(link, "is gone")

    async def _watch(self, link: RankLink) -> None:
        await link.wait_until_silent(self._pulse)
        self._report_lost(link, "is gone" if link.lost else "answers no more")

    def _report_lost(self, link: RankLink, description: str) -> None:
        if not self._stopped:
            self._stopped = True
            self._on_lost(link.rank, description)
