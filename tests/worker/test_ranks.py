"""A worker and its ranks over their socket: authentication, and transfers that fail or succeed as a whole.

The ranks are scripted; tests/e2e/test_ranks.py has real ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.counting import failures_of, skipped
from tests.waiting import WAIT_S
from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.kv.address import KvAddress, KvTransferError, Ticket
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.parallel.rank_links import Pulse, RankLink, RankLinks, RankLost
from worker_agent.parallel.rank_messages import (
    Announce,
    AskQuiet,
    Begin,
    Begun,
    Close,
    Command,
    Connect,
    Done,
    End,
    Ended,
    Hello,
    NumberedAnswer,
    NumberedCommand,
    Open,
    Opened,
    Ping,
    Pull,
    Pulled,
    Quiet,
    RankAnswer,
    encode,
    failed,
    read_frame,
)
from worker_agent.parallel.rank_transfers import RankedTransport

HASHES = [b"a", b"b", b"c"]
SOURCES = [KvAddress(b"theirs %d" % rank, "1") for rank in range(2)]
TICKETS = [Ticket(bytes([rank]) * 32) for rank in range(2)]


class Rank:
    """Scripted rank that records its commands. `slow`: pulls do not end; `missed`: indices of the liveness
    checks that it does not answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received_commands: list[Command] = []
        self.wrong: dict[type, Exception] = {}
        self.slow = False
        self.missed: Container[int] = ()
        self.pulls = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, links: RankLinks, secret: bytes = b"") -> None:
        reader, self._writer = await asyncio.open_unix_connection(links.path)
        self._writer.write(encode(Hello(self.number, secret or links.secret)))
        while True:
            try:
                numbered = msgspec.msgpack.decode(await read_frame(reader), type=NumberedCommand)
            except (asyncio.IncompleteReadError, ConnectionResetError):
                # Closed, perhaps with an answer of this rank unread.
                return
            self.received_commands.append(numbered.command)
            if isinstance(numbered.command, Pull):
                self.pulls.set()
                if self.slow:
                    continue
            if isinstance(numbered.command, Ping) and len(self.commands(Ping)) - 1 in self.missed:
                continue
            error = self.wrong.get(type(numbered.command))
            answer = failed(error) if error is not None else self._answer(numbered.command)
            self._writer.write(encode(NumberedAnswer(numbered.number, answer)))

    def send(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def die(self) -> None:
        assert self._writer is not None
        self._writer.close()

    def commands(self, kind: type) -> list[Command]:
        return [command for command in self.received_commands if isinstance(command, kind)]

    def _answer(self, command: Command) -> RankAnswer:
        match command:
            case Begin():
                return Begun(KvAddress(b"ours %d" % self.number, "1"))
            case Open():
                return Opened(TICKETS[self.number].secret)
            case Pull():
                return Pulled(10 * len(command.hashes))
            case AskQuiet():
                return Quiet(5.0 + self.number)
            case End():
                return Ended(len(HASHES), 100)
            case _:
                return Done()


def time_out_where_missed(patch: pytest.MonkeyPatch, links: RankLinks, ranks: Sequence[Rank]) -> None:
    """Let only those liveness checks time out that the ranks do not answer, however slow this process is."""

    def patient(link: RankLink, rank: Rank) -> Callable[..., Awaitable[RankAnswer]]:
        numbers, ask = itertools.count(), link.ask

        async def asking(command: Command, kind: type[RankAnswer], seconds: float | None) -> RankAnswer:
            assert not isinstance(command, Ping) or seconds == links._pulse.timeout_s
            missed = isinstance(command, Ping) and next(numbers) in rank.missed
            return await ask(command, kind, 0.05 if missed else WAIT_S)

        return asking

    for link, rank in zip(links, ranks, strict=True):
        patch.setattr(link, "ask", patient(link, rank))


class Memory:
    """RankedMemory in which block n has slot 10 + n, and blocks from 2 on have none yet."""

    def __init__(self, links: RankLinks) -> None:
        self.links = links
        self.writing = False
        self.came: list[int] = []

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        return range(10 + first_block, 10 + first_block + num_blocks)

    @contextmanager
    def receiving(self, request_id: str, first_block: int, num_blocks: int) -> Iterator[Sequence[int]]:
        if request_id == "gone":
            raise EngineRefusal("it is not being imported")
        self.writing = True
        try:
            yield range(10 + first_block, min(12, 10 + first_block + num_blocks))
            self.came += range(first_block, first_block + num_blocks)
        finally:
            self.writing = False


@asynccontextmanager
async def two_ranks(
    lost: Callable[[int, str], None] = lambda rank, what: None,
    pulse: Pulse | None = None,
) -> AsyncIterator[tuple[list[Rank], RankLinks]]:
    links, ranks = RankLinks(2, lost, pulse), [Rank(0), Rank(1)]
    await links.open()
    # Not in order of rank: they connect once they have loaded.
    running = [asyncio.create_task(rank.run(links)) for rank in reversed(ranks)]
    await links.wait_for_all(WAIT_S)
    try:
        yield ranks, links
    finally:
        await links.stop()
        await asyncio.gather(*running)


@asynccontextmanager
async def transport() -> AsyncIterator[tuple[list[Rank], Memory, RankedTransport, WorkerMetrics]]:
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    async with two_ranks() as (ranks, links):
        memory = Memory(links)
        yield (
            ranks,
            memory,
            await RankedTransport.begin(memory, metrics, "w", "model", 16, {}, False),
            metrics,
        )


async def test_each_rank_has_its_own_name_and_address() -> None:
    async with transport() as (ranks, _, ranked, _):
        assert [address.worker for address in ranked.addresses] == [b"ours 0", b"ours 1"]
        assert [rank.commands(Begin) for rank in ranks] == [
            [Begin("w", "model rank 0", 16, {}, False)],
            [Begin("w", "model rank 1", 16, {}, False)],
        ]


async def test_export_is_opened_announced_and_ended_in_every_rank() -> None:
    async with transport() as (ranks, _, ranked, metrics):
        session = await ranked.open("r", SOURCES)
        await session.announce(4, HASHES)
        # As long as every rank is fetched from nothing.
        assert await session.quiet_s() == 5.0
        session.taken = True
        await session.end()
        assert list(session.tickets) == TICKETS
        for rank, source in zip(ranks, SOURCES, strict=True):
            assert rank.commands(Open) == [Open(1, source)]
            assert rank.commands(Announce) == [Announce(1, 4, HASHES, [14, 15, 16])]
            assert rank.commands(End) == [End(1, True)]
        # Each rank sent its part of the same blocks.
        assert (metrics.kv_sent_blocks, metrics.kv_sent_bytes) == (3, 200)


async def test_round_is_complete_when_every_rank_has_its_part() -> None:
    async with transport() as (ranks, memory, ranked, metrics):
        transfer = await ranked.connect("r", SOURCES, TICKETS)
        assert await transfer.pull(0, HASHES) == 60
        assert memory.came == [0, 1, 2] and not memory.writing
        await transfer.close()
        await transfer.close()
        for rank, source, ticket in zip(ranks, SOURCES, TICKETS, strict=True):
            assert rank.commands(Connect) == [Connect(1, "r", source, ticket.secret)]
            # Blocks without a slot yet are omitted from the list of slots.
            assert rank.commands(Pull) == [Pull(1, 0, HASHES, [10, 11])]
            assert rank.commands(Close) == [Close(1)]
        assert (metrics.kv_received_blocks, metrics.kv_received_bytes) == (3, 60)


async def test_failure_of_one_rank_fails_all_and_stops_writes() -> None:
    async with transport() as (ranks, memory, ranked, _):
        transfer = await ranked.connect("r", SOURCES, TICKETS)
        ranks[0].slow, ranks[1].wrong[Pull] = True, KvCorrupt("block 2")
        with pytest.raises(KvCorrupt, match="rank 1: block 2"):
            await transfer.pull(0, HASHES)
        assert memory.came == [] and not memory.writing
        assert all(rank.commands(Close) for rank in ranks)


async def test_cancelled_transfer_is_closed_first() -> None:
    async with transport() as (ranks, memory, ranked, _):
        transfer = await ranked.connect("r", SOURCES, TICKETS)
        for rank in ranks:
            rank.slow = True
        pulling = asyncio.create_task(transfer.pull(0, HASHES))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(rank.pulls.wait() for rank in ranks))
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert all(rank.commands(Close) for rank in ranks) and not memory.writing


async def test_partial_open_or_connect_leaves_nothing_behind() -> None:
    async with transport() as (ranks, _, ranked, _):
        ranks[1].wrong = {Open: KvTransferError("too many"), Connect: KvTransferError("nobody there")}
        with pytest.raises(KvTransferError, match="rank 1: too many"):
            await ranked.open("r", SOURCES)
        with pytest.raises(KvTransferError, match="rank 1: nobody there"):
            await ranked.connect("r", SOURCES, TICKETS)
        assert ranks[0].commands(End) == [End(1, False)]
        assert ranks[0].commands(Close) == [Close(2)]


async def test_death_of_a_rank_is_reported_once_and_fails_pending_calls() -> None:
    lost: list[tuple[int, str]] = []
    async with two_ranks(lambda *loss: lost.append(loss)) as (ranks, links):
        memory = Memory(links)
        metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        ranked = await RankedTransport.begin(memory, metrics, "w", "model", 16, {}, False)
        transfer = await ranked.connect("r", SOURCES, TICKETS)
        for rank in ranks:
            rank.slow = True
        pulling = asyncio.create_task(transfer.pull(0, HASHES))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(rank.pulls.wait() for rank in ranks))
        ranks[1].die()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await pulling
        ranks[0].die()
        with pytest.raises(RankLost):
            await ranked.connect("r", SOURCES, TICKETS)
    assert lost == [(1, "is gone")]


async def test_a_rank_that_sends_something_else_is_lost_and_counted() -> None:
    lost: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    before = skipped("answer of a rank")
    async with two_ranks(lambda *loss: lost.set_result(loss)) as (ranks, _):
        ranks[1].send(b"\x01\x00\x00\x00\xc1")
        async with asyncio.timeout(WAIT_S):
            assert await lost == (1, "is gone")
    assert skipped("answer of a rank") == before + 1


async def test_a_pulse_that_fails_in_an_unforeseen_way_is_counted_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    before = failures_of("pulses of ranks")
    async with two_ranks(lambda *loss: lost.set_result(loss), Pulse(0.01)) as (ranks, links):
        time_out_where_missed(monkeypatch, links, ranks)
        ranks[1].wrong[Ping] = KvTransferError("it cannot say")
        links.watch()
        async with asyncio.timeout(WAIT_S):
            while failures_of("pulses of ranks") == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ranks[1].wrong.clear()
            # Some later than those that have been sent by now.
            first = len(ranks[1].commands(Ping)) + 5
            ranks[1].missed = range(first, first + 1_000)
            assert await lost == (1, "answers no more")


async def test_unresponsive_rank_is_lost_but_one_late_reply_is_tolerated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    async with two_ranks(lambda *loss: lost.set_result(loss), Pulse(every_s=0.01)) as (ranks, links):
        time_out_where_missed(monkeypatch, links, ranks)
        ranks[1].missed = (1, 3, 4)
        links.watch()
        async with asyncio.timeout(WAIT_S):
            assert await lost == (1, "answers no more")
    assert len(ranks[1].commands(Ping)) == 5


async def test_connection_without_the_secret_is_refused() -> None:
    links, ranks = RankLinks(2, lambda rank, what: None), [Rank(0), Rank(1)]
    await links.open()
    await Rank(1).run(links, b"another secret of 32 bytes.......")
    await Rank(7).run(links)
    await Rank(-1).run(links)
    running = [asyncio.create_task(rank.run(links)) for rank in ranks]
    await links.wait_for_all(WAIT_S)
    assert [link.rank for link in links] == [0, 1]
    # Its folder has been removed, so no rank can connect any more.
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(links.path)
    await links.stop()
    await asyncio.gather(*running)


async def test_missing_ranks_are_named() -> None:
    links = RankLinks(2, lambda rank, what: None)
    await links.open()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] did not report"):
        await links.wait_for_all(0.01)
