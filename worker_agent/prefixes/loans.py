"""The holder's side of loans: let another worker copy cached blocks while its Lend call lasts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tailrace.service.tasks import run_to_completion
from tailrace.v1 import cache_pb2
from worker_agent.engine.base import Engine, KvShape
from worker_agent.engine.errors import EngineRefusal
from worker_agent.faults import Faults
from worker_agent.kv.address import BlockSession, BlockSource, KvTransferError, addresses_of, kv_layout

# Maximum concurrent loans, each of which keeps blocks from being evicted.
_LOANS_MAX: Final = 16
# Maximum duration of a loan in seconds, even if the borrower's deadline is later.
LOAN_MAX_S: Final = 300.0


class LoanRefused(Exception):
    """The loan was refused; the message says why."""


class Loans:
    """All loans of a worker."""

    def __init__(self, engine: Engine, shape: KvShape, blocks: BlockSource, faults: Faults) -> None:
        self._engine = engine
        self._shape = shape
        self._blocks = blocks
        self._faults = faults
        self._numbers = itertools.count(1)
        self._open = 0

    @asynccontextmanager
    async def lend(self, request: cache_pb2.LendRequest) -> AsyncIterator[cache_pb2.Lent]:
        """Pin the leading blocks with these names, for reading by the requesting target only, until the
        context exits. Raise LoanRefused."""
        if self._open >= _LOANS_MAX:
            raise LoanRefused(f"{_LOANS_MAX} loans are open")
        loan_id = f"loan {next(self._numbers)}"
        session: BlockSession | None = None
        self._open += 1
        try:
            count = await run_to_completion(self._engine.loan_open(loan_id, list(request.names)))
            targets = addresses_of(request.kv_addresses, self._blocks.addresses)
            if count and targets:
                session = await self._blocks.open(loan_id, targets)
                await session.announce(0, request.names[:count])
            await self._faults.hold("lend:open")
            yield cache_pb2.Lent(
                layout=kv_layout(self._shape),
                blocks=0 if session is None else count,
                kv_addresses=[address.message() for address in self._blocks.addresses],
                kv_tickets=[] if session is None else [ticket.secret for ticket in session.tickets],
            )
        except (EngineRefusal, KvTransferError) as error:
            raise LoanRefused(str(error)) from error
        finally:
            self._open -= 1
            await run_to_completion(self._end(loan_id, session))

    async def _end(self, loan_id: str, session: BlockSession | None) -> None:
        try:
            if session is not None:
                await session.end()
        finally:
            await self._engine.loan_end(loan_id)
