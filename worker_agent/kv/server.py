"""The source's side of the KV transport: one session per export."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from tailrace.service.tasks import cancel, task_error
from worker_agent.engine.base import KvShape
from worker_agent.faults import Faults
from worker_agent.kv.address import KvAddress, KvTransferError
from worker_agent.kv.conversation import Conversation
from worker_agent.kv.segments import Segments
from worker_agent.kv.sessions import Session
from worker_agent.kv.staging import KvMemory, StagingPool
from worker_agent.kv.transport import Channel, own_address
from worker_agent.metrics import WorkerMetrics

log = logging.getLogger(__name__)

# Seconds for a target to use its ticket: it may have to wait for room first.
CLAIM_S: Final = 30.0
# Maximum concurrent exports of a worker; the migration service admits far fewer.
SESSIONS_MAX: Final = 64


class KvServer:
    """Serve announced blocks to targets: one session per export, each with its own endpoint to the address
    that its target sent over gRPC."""

    def __init__(
        self,
        memory: KvMemory,
        shape: KvShape,
        pool: StagingPool,
        segments: Segments,
        faults: Faults,
        metrics: WorkerMetrics,
        sealed: bool,
        claim_s: float = CLAIM_S,
    ) -> None:
        """UCX must be started. `sealed`: blocks leave this host only encrypted. `claim_s`: seconds within
        which a session's target must send its first request."""
        self._memory = memory
        self._shape = shape
        self._pool = pool
        self._faults = faults
        self._metrics = metrics
        self._claim_s = claim_s
        self._address = own_address(sealed)
        self._segments = segments
        self._sessions: dict[Session, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Return the number of sessions whose endpoints are not closed yet."""
        return len(self._sessions)

    @property
    def address(self) -> KvAddress:
        """Return the address to which targets connect."""
        return self._address

    async def open(self, request_id: str, target: KvAddress) -> Session:
        """Open a session for an export's target. Raise KvTransferError."""
        if len(self._sessions) >= SESSIONS_MAX:
            raise KvTransferError(f"{SESSIONS_MAX} exports are open")
        session = Session(request_id)
        channel = await Channel.connect(target)
        segments = self._segments if target.shares_memory(self._address) else None
        conversation = Conversation(
            channel,
            session,
            self._memory,
            self._shape,
            self._pool,
            segments,
            self._faults,
            self._metrics,
            # `target.sealed` comes over the authenticated gRPC channel; the UCX link is not authenticated.
            self._address.sealed or target.sealed,
        )
        task = asyncio.create_task(conversation.run(self._claim_s), name=f"KV of {request_id}")
        self._sessions[session] = task
        task.add_done_callback(partial(self._done, session))
        try:
            # Let the event loop post the first receives before the ticket is handed out.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return session

    async def end(self, session: Session) -> None:
        """End a session; wait until none of its blocks is being read."""
        session.closed = True
        if session in self._sessions:
            self._sessions[session].cancel()
        await session.drained()

    async def close(self) -> None:
        """End every session."""
        await cancel(*self._sessions.values())

    def _done(self, session: Session, task: asyncio.Task[None]) -> None:
        session.closed = True
        del self._sessions[session]
        if (error := task_error(task)) is not None:
            # The target only learns that the session has ended, so the reason is logged here.
            log.error("a KV session failed", exc_info=error)
