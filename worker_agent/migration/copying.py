"""Copy one request to the target: rounds while the source decodes, then the rest during the pause.

Everything here can be cancelled at any moment; the owner of the import then drops the reservation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tailrace.service.tasks import run_to_completion
from tailrace.v1 import types_pb2, worker_pb2
from worker_agent.engine.base import Engine, ExportedPause
from worker_agent.faults import Faults
from worker_agent.kv.address import BlockTransfer, KvTransferError
from worker_agent.migration.link_budget import LinkBudget
from worker_agent.migration.messages import block_hashes, pause_of
from worker_agent.migration.source_link import SourceLink, SourceLost
from worker_agent.migration.way import ImportPlan

log = logging.getLogger(__name__)

_MS: Final = 1000.0
# Blocks per pull on a shared link: tens of milliseconds of a fast link.
_SLICE_BLOCKS: Final = 256
# Of a source whose blocks cannot be read: the request may be paused meanwhile.
_WHY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round. Times of the monotonic clock."""

    state: types_pb2.MigrationState.ValueType
    message: worker_pb2.CopyRound
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Paused:
    """The request as the source paused it, with all of its KV here."""

    pause: ExportedPause
    # When it was paused, on this machine's monotonic clock; includes the way of the command.
    since_s: float
    # State as of the arrival here; None before the first answering token.
    answer_pace: worker_pb2.AnswerPace | None
    arrived_s: float


class Copying:
    """Pull one export's blocks into the engine's reservation."""

    def __init__(
        self,
        engine: Engine,
        transfer: BlockTransfer,
        source: SourceLink,
        faults: Faults,
        request_id: str,
        on_round: Callable[[Round], None],
        link: LinkBudget | None,
        held: int = 0,
    ) -> None:
        """`link`: limits background copies while the source decodes; None: no limit.

        `held`: number of leading blocks that are here already.
        """
        self._engine = engine
        self._transfer = transfer
        self._source = source
        self._faults = faults
        self._request_id = request_id
        self._on_round = on_round
        self._link = link
        self._have = held
        self._rounds = 0
        self._pausing = False

    async def run(self, opened: worker_pb2.ExportOpened, plan: ImportPlan) -> Paused:
        """Run all rounds and the pause; when this returns, the engine is prepared."""
        if plan.rounds:
            await self._pre_copy(block_hashes(opened.blocks)[self._have :], plan)
        return await self._stop_and_copy()

    async def _pre_copy(self, hashes: list[bytes], plan: ImportPlan) -> None:
        """Copy what exists while the source decodes, then what was added meanwhile, until little is left."""
        await self._faults.hold("import:pre_copy")
        for _ in range(plan.rounds):
            if hashes:
                await self._round(types_pb2.MIGRATION_STATE_PRE_COPY, hashes)
            more = worker_pb2.ExportMore(have_blocks=self._have)
            event = await self._source.ask(worker_pb2.ExportCommand(more=more))
            if event.WhichOneof("body") != "blocks" or event.blocks.first_block != self._have:
                raise SourceLost("the source did not reply with the requested blocks")
            copied = len(hashes)
            hashes = block_hashes(event.blocks.blocks)
            # As many blocks were added as this round copied: another round would not reduce the rest.
            if len(hashes) <= plan.stop_blocks or len(hashes) >= copied > 0:
                return

    async def _stop_and_copy(self) -> Paused:
        requested_s = time.monotonic()
        self._pausing = True
        command = worker_pb2.ExportPause(have_blocks=self._have)
        event = await self._source.ask(worker_pb2.ExportCommand(pause=command))
        if event.WhichOneof("body") != "paused" or event.paused.first_block != self._have:
            raise SourceLost("the source did not reply with the requested blocks")
        pause, arrived_s = pause_of(event.paused), time.monotonic()
        pace = event.paused.answer_pace if event.paused.HasField("answer_pace") else None
        await self._faults.hold("import:paused")
        await self._round(types_pb2.MIGRATION_STATE_STOP_AND_COPY, pause.block_hashes)
        await run_to_completion(self._engine.import_prepare(self._request_id, pause))
        return Paused(pause, requested_s + pause.waited_s, pace, arrived_s)

    async def _round(self, state: types_pb2.MigrationState.ValueType, hashes: list[bytes]) -> None:
        began_s = time.monotonic()
        await run_to_completion(self._engine.import_reserve(self._request_id, self._have + len(hashes)))
        # No limit during the pause, in which the request does not run.
        pre_copy = state == types_pb2.MIGRATION_STATE_PRE_COPY
        if self._link is not None and pre_copy:
            size = 0
            for start in range(0, len(hashes), _SLICE_BLOCKS):
                await self._link.wait_for_budget()
                with self._link.transfer():
                    size += await self._pull(hashes[start : start + _SLICE_BLOCKS])
        else:
            size = await self._pull(hashes)
        self._rounds += 1
        ended_s = time.monotonic()
        message = worker_pb2.CopyRound(
            number=self._rounds, blocks=len(hashes), bytes=size, ms=(ended_s - began_s) * _MS
        )
        self._on_round(Round(state, message, began_s, ended_s))

    async def _pull(self, hashes: Sequence[bytes]) -> int:
        try:
            size = await self._transfer.pull(self._have, hashes)
        except KvTransferError:
            await self._ask_why()
            raise
        self._have += len(hashes)
        return size

    async def _ask_why(self) -> None:
        """Let the source say why its blocks cannot be read: mostly because the request has ended. Raise
        SourceFailed or SourceLost, and return if it knows of no reason."""
        try:
            async with asyncio.timeout(_WHY_S):
                if self._pausing:
                    # It says by itself that a paused request was aborted.
                    await self._source.failure()
                else:
                    more = worker_pb2.ExportMore(have_blocks=self._have)
                    await self._source.ask(worker_pb2.ExportCommand(more=more))
        except TimeoutError:
            return
