"""The KV transport of an engine with several ranks: every rank transfers its own part at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from tailrace.service.tasks import run_to_completion
from worker_agent.engine.base import RankedMemory
from worker_agent.engine.errors import EngineRefusal
from worker_agent.kv.address import KvAddress, KvTransferError, Ticket
from worker_agent.metrics import WorkerMetrics
from worker_agent.parallel.rank_links import RankLink
from worker_agent.parallel.rank_messages import (
    Announce,
    AskQuiet,
    Begin,
    Begun,
    Close,
    Connect,
    Done,
    End,
    Ended,
    Open,
    Opened,
    Pull,
    Pulled,
    Quiet,
)

_T = TypeVar("_T")


class RankedSession:
    """The BlockSession of one export, in every rank."""

    def __init__(
        self,
        request_id: str,
        memory: RankedMemory,
        tickets: Sequence[Ticket],
        announce: Callable[[int, Sequence[bytes], Sequence[int]], Awaitable[None]],
        quiet_s: Callable[[], Awaitable[float]],
        end: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`announce` takes first block, hashes and places; `end` takes whether the target has everything."""
        self.tickets = tickets
        self.taken = False
        self._request_id = request_id
        self._memory = memory
        self._announce = announce
        self._quiet_s = quiet_s
        self._end = end

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        try:
            block_ids = self._memory.exported(self._request_id, first_block, len(hashes))
        except EngineRefusal as error:
            raise KvTransferError(str(error)) from error
        await self._announce(first_block, hashes, block_ids)

    async def quiet_s(self) -> float:
        return await self._quiet_s()

    async def end(self) -> None:
        await self._end(self.taken)


class RankedTransfer:
    """The BlockTransfer of a migration. Fails as a whole: a round completes when every rank has its part."""

    def __init__(self, number: int, request_id: str, memory: RankedMemory, metrics: WorkerMetrics) -> None:
        self._number = number
        self._request_id = request_id
        self._memory = memory
        self._metrics = metrics
        self._closed = False

    async def connect(self, sources: Sequence[KvAddress], tickets: Sequence[Ticket]) -> None:
        """Connect every rank to the same rank of the source. Raise KvTransferError, having undone
        everything."""
        calls = [
            link.ask(Connect(self._number, self._request_id, source, ticket.secret), Done)
            for link, source, ticket in zip(self._memory.links, sources, tickets, strict=True)
        ]
        try:
            await _gather_all(calls)
        except BaseException:
            await run_to_completion(self.close())
            raise

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        if not hashes:
            return 0
        with self._memory.receiving(self._request_id, first_block, len(hashes)) as block_ids:
            command = Pull(self._number, first_block, list(hashes), list(block_ids))
            try:
                pulled = await _gather_all(link.ask(command, Pulled, None) for link in self._memory.links)
            except BaseException:
                # No rank may still be writing when this returns.
                await run_to_completion(self.close())
                raise
        size = sum(part.bytes for part in pulled)
        self._metrics.kv_received_blocks += len(hashes)
        self._metrics.kv_received_bytes += size
        return size

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        calls = [link.ask(Close(self._number), Done) for link in self._memory.links]
        _results_or_raise(await asyncio.gather(*calls, return_exceptions=True))


class RankedTransport:
    """The BlockSource and BlockPuller of an engine with several ranks."""

    def __init__(self, memory: RankedMemory, metrics: WorkerMetrics, addresses: Sequence[KvAddress]) -> None:
        self._memory = memory
        self._metrics = metrics
        self.addresses = addresses
        self._numbers = itertools.count(1)

    @classmethod
    async def begin(
        cls,
        memory: RankedMemory,
        metrics: WorkerMetrics,
        instance_id: str,
        fingerprint: str,
        block_tokens: int,
        ucx: Mapping[str, str],
        sealed: bool,
    ) -> RankedTransport:
        """Start UCX in every rank with these options, and start watching the ranks.

        `sealed`: KV is encrypted before it leaves the host. Raise KvTransferError.
        """

        async def begin(link: RankLink) -> KvAddress:
            # A rank accepts KV only from the same rank of another worker.
            name = f"{fingerprint} rank {link.rank}"
            return (await link.ask(Begin(instance_id, name, block_tokens, dict(ucx), sealed), Begun)).address

        addresses = await _gather_all(begin(link) for link in memory.links)
        memory.links.watch()
        return cls(memory, metrics, addresses)

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> RankedSession:
        number = next(self._numbers)
        calls = [
            link.ask(Open(number, target), Opened)
            for link, target in zip(self._memory.links, targets, strict=True)
        ]
        try:
            opened = await _gather_all(calls)
        except BaseException:
            await run_to_completion(self._end(number, False))
            raise
        tickets = [Ticket(session.ticket) for session in opened]
        return RankedSession(
            request_id,
            self._memory,
            tickets,
            partial(self._announce, number),
            partial(self._quiet_s, number),
            partial(self._end, number),
        )

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> RankedTransfer:
        if len(tickets) != len(sources):
            raise KvTransferError(f"{len(tickets)} tickets for {len(sources)} ranks")
        transfer = RankedTransfer(next(self._numbers), request_id, self._memory, self._metrics)
        await transfer.connect(sources, tickets)
        return transfer

    async def close(self) -> None:
        """Do nothing: the ranks' transfers end with the engine."""

    async def _announce(
        self, number: int, first_block: int, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        command = Announce(number, first_block, list(hashes), list(block_ids))
        await _gather_all(link.ask(command, Done) for link in self._memory.links)

    async def _quiet_s(self, number: int) -> float:
        quiet = await _gather_all(link.ask(AskQuiet(number), Quiet) for link in self._memory.links)
        return min(each.seconds for each in quiet)

    async def _end(self, number: int, committed: bool) -> None:
        calls = [link.ask(End(number, committed), Ended) for link in self._memory.links]
        ended = _results_or_raise(await asyncio.gather(*calls, return_exceptions=True))
        self._metrics.kv_sent_blocks += max((session.blocks for session in ended), default=0)
        self._metrics.kv_sent_bytes += sum(session.bytes for session in ended)


async def _gather_all(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return all results, or raise the first error and cancel the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    failed_task = next((task for task in tasks if task.done() and task.exception() is not None), None)
    if failed_task is None:
        return [task.result() for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    try:
        return [failed_task.result()]
    finally:
        del tasks, task, failed_task


def _results_or_raise(answers: Sequence[_T | BaseException]) -> list[_T]:
    """Return the results of the ranks that answered. Raise any error that is no KvTransferError."""
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, KvTransferError):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
