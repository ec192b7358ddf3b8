"""The agent in a rank's process: a thread that carries out the worker's commands for the rank's KV transfers.

vLLM's own thread of that process runs the steps and does not know about it. When the worker's process dies,
the agent ends the rank too, whatever its steps and transfers are waiting for, and removes what the ranks
shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import CollectorRegistry

from tailrace.service.tasks import cancel, run_to_completion
from worker_agent.engine.base import Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.kv_blocks import DeviceStaging, KvBlocks
from worker_agent.faults import Faults
from worker_agent.kv.address import KvTransferError, Ticket
from worker_agent.kv.client import KvClient, KvTransfer
from worker_agent.kv.memory import SharedMemory, StagingPool, require_sealable
from worker_agent.kv.server import KvServer, KvSession
from worker_agent.kv.ucx import discarding_strays, start_ucx, stop_ucx
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.parallel.rank_leftovers import names_of, remove, remove_meeting
from worker_agent.parallel.rank_messages import (
    Address,
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
    Stop,
    encode,
    failed,
    rank_shape,
    read_frame,
)

log = logging.getLogger(__name__)


class RankMemory:
    """The KvMemory of a rank. Everything but `settle` runs on the event loop of the rank's agent."""

    def __init__(self, kv: KvBlocks) -> None:
        self._kv = kv
        # Blocks of each export, by the name of its session; the engine has them pinned.
        self._exported: dict[str, list[int]] = {}
        # Blocks received before they had a place, by request: (first block, bytes).
        self._unplaced: dict[str, list[tuple[int, DeviceStaging]]] = {}

    # ---- source

    def export(self, name: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Record where the export's blocks are, from number `first_block` on."""
        self._exported.setdefault(name, [])[first_block:] = block_ids

    def forget(self, name: str) -> None:
        """Remove an export that is no longer read."""
        self._exported.pop(name, None)

    def staging(self, num_blocks: int) -> Staging:
        return self._kv.staging(num_blocks)

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        return self._kv.staging_over(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """See KvMemory.read_blocks; `request_id` is the session's name."""
        assert isinstance(out, DeviceStaging)
        block_ids = self._exported.get(request_id, [])[first_block : first_block + num_blocks]
        if len(block_ids) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all exported")
        return await asyncio.to_thread(self._kv.gather, block_ids, out)

    # ---- target

    def expect(self, request_id: str) -> None:
        """Prepare to receive blocks of the request."""
        self._unplaced[request_id] = []

    def leave(self, request_id: str) -> None:
        """Drop what was received for the request and has no place."""
        self._unplaced.pop(request_id, None)

    async def write(
        self,
        request_id: str,
        first_block: int,
        block_ids: Sequence[int],
        received: Staging,
        checksums: Sequence[int],
    ) -> None:
        """Verify received blocks and copy them to `block_ids`; keep those beyond for `settle`.

        Raise KvCorrupt before anything is written.
        """
        assert isinstance(received, DeviceStaging)
        unplaced = self._unplaced.get(request_id)

        def copy() -> None:
            self._kv.verify(received, checksums, first_block)
            placed, num_received = len(block_ids), len(checksums)
            if placed:
                self._kv.scatter(received, block_ids)
            if placed < num_received and unplaced is not None:
                unplaced.append((first_block + placed, received.part(placed, num_received - placed).copy()))

        await asyncio.to_thread(copy)

    def settle(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copy the kept blocks to their places.

        `block_ids`: the places of all the request's blocks. Runs on the rank's own thread between two steps,
        once everything has been received.
        """
        for first, staging in self._unplaced.pop(request_id, []):
            self._kv.scatter(staging, block_ids[first : first + len(staging.bytes)])


# Allowed for the transfers to end after the worker has died, and then for the rank to exit by itself.
_ORPHAN_S: Final = 5.0


def start_agent(rank: int, kv: KvBlocks, meeting: str, address: Address) -> RankMemory:
    """Start the agent's thread and return the memory that it shares with the rank's own thread.

    `address`: where the worker listens. `meeting`: name of the ranks' rendezvous file.
    """
    memory = RankMemory(kv)
    agent = RankAgent(rank, kv, meeting, memory)
    threading.Thread(target=_run, args=(agent, address), name="tailrace-rank", daemon=True).start()
    return memory


def _run(agent: RankAgent, address: Address) -> None:
    try:
        asyncio.run(agent.run(address))
    except Exception:
        log.exception("a rank's transfers failed")
        os._exit(1)


@dataclass(slots=True)
class _Transfer:
    """An incoming transfer. At most one pull runs at a time."""

    request_id: str
    kv: KvTransfer = field(init=False)
    pulling: asyncio.Task[int] | None = None
    # Of this pull: its first block, and the places of its blocks.
    first_block: int = 0
    block_ids: Sequence[int] = ()

    async def close(self) -> None:
        """Close it; it receives no more."""
        await run_to_completion(self.kv.close())
        # It refers to this transfer, to which it has delivered.
        del self.kv


@dataclass(slots=True)
class _Transport:
    """What exists once UCX has started."""

    server: KvServer
    client: KvClient
    metrics: WorkerMetrics
    memory: SharedMemory
    sessions: dict[int, KvSession] = field(default_factory=dict)
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    # Totals already reported to the worker.
    reported_blocks: int = 0
    reported_bytes: int = 0
    # Exports and transfers being opened, and whether each was cancelled meanwhile. The two share one
    # numbering.
    _opening: dict[int, bool] = field(default_factory=dict)

    @contextmanager
    def opening(self, number: int) -> Iterator[Callable[[], bool]]:
        """Mark `number` as being opened; yields a function that returns whether it was cancelled
        meanwhile."""
        self._opening[number] = False
        try:
            yield lambda: self._opening[number]
        finally:
            del self._opening[number]

    def cancel_opening(self, number: int) -> None:
        """If `number` is being opened, make its opener undo it."""
        if number in self._opening:
            self._opening[number] = True


class RankAgent:
    """Carries out the worker's commands in one rank."""

    def __init__(self, rank: int, kv: KvBlocks, meeting: str, memory: RankMemory) -> None:
        self._rank = rank
        self._kv = kv
        self._meeting = meeting
        self._memory = memory
        self._transport: _Transport | None = None
        self._commands: set[asyncio.Task[None]] = set()

    async def run(self, address: Address) -> None:
        """Serve the worker's commands until it sends Stop; ends the process if the worker dies."""
        if self._kv.device.type == "cuda":
            torch.cuda.set_device(self._kv.device)
        reader, writer = await asyncio.open_unix_connection(address.path)
        writer.write(encode(Hello(self._rank, address.secret)))
        stop_number: int | None = None
        try:
            stop_number = await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            log.warning("rank %d: its worker is gone", self._rank)
        if stop_number is None:
            await self._end_orphaned()
        await self._end()
        writer.write(encode(NumberedAnswer(stop_number, Done())))
        await writer.drain()
        writer.close()

    async def _end_orphaned(self) -> NoReturn:
        """End this process: without a worker nothing else would, and it must not keep holding a device."""
        # On a separate thread: closing UCX, or waiting for a copy, can block the event loop forever.
        threading.Timer(2 * _ORPHAN_S, os._exit, (1,)).start()
        # First, because vLLM's thread may notice as well, and end the process at any moment.
        remove(names_of([os.getpid()]))
        remove_meeting(self._meeting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ORPHAN_S):
                await self._end()
        # vLLM's thread does not, if it is waiting for another rank.
        await asyncio.sleep(_ORPHAN_S)
        os._exit(1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Carry out commands until Stop; returns that command's number."""
        decoder = msgspec.msgpack.Decoder(NumberedCommand)
        # The first command starts UCX; there are no stray messages to discard before that.
        request = decoder.decode(await read_frame(reader))
        if isinstance(request.command, Stop):
            return request.number
        assert isinstance(request.command, Begin)
        try:
            begun: RankAnswer = self._begin(request.command)
        except KvTransferError as error:
            # The worker reports the reason and stops.
            begun = failed(error)
        writer.write(encode(NumberedAnswer(request.number, begun)))
        async with discarding_strays(lambda count: None):
            while True:
                request = decoder.decode(await read_frame(reader))
                if isinstance(request.command, Stop):
                    return request.number
                task = asyncio.create_task(self._answer(request, writer), name="rank's command")
                self._commands.add(task)
                task.add_done_callback(self._commands.discard)

    async def _answer(self, request: NumberedCommand, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._execute(request.command)
        # A failure of one transfer must not end the rank.
        except Exception as error:
            answer = failed(error)
            if answer.kind == "transfer" and not isinstance(error, KvTransferError):
                log.exception("rank %d: a transfer failed", self._rank)
        writer.write(encode(NumberedAnswer(request.number, answer)))

    def _begin(self, begin: Begin) -> Begun:
        start_ucx(begin.ucx)
        kv = self._kv
        shape = rank_shape(begin.fingerprint, begin.block_tokens, kv.num_layers, kv.layer_block_bytes)
        metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        if begin.sealed:
            require_sealable(self._memory, shape.block_bytes)
        pool, memory = StagingPool(self._memory, shape.block_bytes), SharedMemory()
        faults = Faults.from_environment(begin.instance_id)
        self._transport = _Transport(
            KvServer(self._memory, shape, pool, memory.segments, faults, metrics, begin.sealed),
            KvClient(shape, pool, memory.mappings, metrics, begin.sealed),
            metrics,
            memory,
        )
        return Begun(self._transport.server.address)

    async def _execute(self, command: Command) -> RankAnswer:
        transport = self._transport
        assert transport is not None
        match command:
            case Open():
                return await self._open(transport, command)
            case Announce():
                await self._announce(transport, command)
                return Done()
            case AskQuiet():
                return Quiet(await self._session(transport, command.export).quiet_s())
            case End():
                return await self._end_export(transport, command)
            case Connect():
                await self._connect(transport, command)
                return Done()
            case Pull():
                return await self._pull(transport, command)
            case Close():
                await self._close(transport, command.transfer)
                return Done()
            case Ping():
                # A rank does not see who is in the fleet; this comes every few seconds.
                transport.memory.mappings.drop_gone()
                return Done()
            case _:
                raise KvTransferError(f"unexpected command {type(command).__name__}")

    async def _open(self, transport: _Transport, command: Open) -> Opened:
        with transport.opening(command.export) as cancelled:
            session = await transport.server.open(_name(command.export), command.target)
            if cancelled():
                await run_to_completion(session.end())
                raise KvTransferError("the export has ended")
            transport.sessions[command.export] = session
        return Opened(session.ticket.secret)

    @staticmethod
    def _session(transport: _Transport, export: int) -> KvSession:
        session = transport.sessions.get(export)
        if session is None:
            raise KvTransferError("the export has ended")
        return session

    async def _announce(self, transport: _Transport, command: Announce) -> None:
        session = self._session(transport, command.export)
        self._memory.export(_name(command.export), command.first_block, command.block_ids)
        await session.announce(command.first_block, command.hashes)

    async def _end_export(self, transport: _Transport, command: End) -> Ended:
        session = transport.sessions.pop(command.export, None)
        transport.cancel_opening(command.export)
        if session is not None:
            session.taken = command.taken
            await session.end()
        self._memory.forget(_name(command.export))
        metrics = transport.metrics
        blocks, size = metrics.kv_sent_blocks, metrics.kv_sent_bytes
        ended = Ended(blocks - transport.reported_blocks, size - transport.reported_bytes)
        transport.reported_blocks, transport.reported_bytes = blocks, size
        return ended

    async def _connect(self, transport: _Transport, command: Connect) -> None:
        with transport.opening(command.transfer) as cancelled:
            transfer = _Transfer(command.request_id)
            deliver = partial(self._deliver, transfer)
            transfer.kv = await transport.client.connect(command.source, Ticket(command.ticket), deliver)
            if cancelled():
                await transfer.close()
                raise KvTransferError("the transfer was aborted")
            self._memory.expect(command.request_id)
            transport.transfers[command.transfer] = transfer

    async def _pull(self, transport: _Transport, command: Pull) -> Pulled:
        transfer = transport.transfers.get(command.transfer)
        if transfer is None or transfer.pulling is not None:
            raise KvTransferError("this transfer is over, or busy")
        transfer.first_block, transfer.block_ids = command.first_block, command.block_ids
        transfer.pulling = asyncio.ensure_future(transfer.kv.pull(command.first_block, command.hashes))
        try:
            await asyncio.wait({transfer.pulling})
            if transfer.pulling.cancelled():
                raise KvTransferError("the transfer was aborted")
            return Pulled(transfer.pulling.result())
        finally:
            transfer.pulling = None

    async def _deliver(
        self, transfer: _Transfer, at: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        first = at - transfer.first_block
        places = transfer.block_ids[first : first + num_blocks]
        await self._memory.write(transfer.request_id, at, places, received, checksums)

    async def _close(self, transport: _Transport, number: int) -> None:
        transfer = transport.transfers.pop(number, None)
        transport.cancel_opening(number)
        if transfer is None:
            return
        if transfer.pulling is not None:
            await cancel(transfer.pulling)
        await transfer.close()
        self._memory.leave(transfer.request_id)

    async def _end(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        for number in list(transport.transfers):
            await self._close(transport, number)
        await transport.server.close()
        transport.memory.segments.close()
        stop_ucx()


def _name(export: int) -> str:
    return f"export {export}"
