"""Send messages to other workers: in order for each, and each with a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import grpc

from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, run_once
from tailrace.telemetry.incidents import loop_failed
from worker_agent.bidask.messages import Wire

log = logging.getLogger(__name__)

_WAITING_MAX: Final = 1_024

# Sends to an address; raises grpc.aio.AioRpcError.
Send = Callable[[str, Wire], Awaitable[object]]


class Peers:
    """One queue and at most one task per peer. Messages for a peer that does not answer are dropped."""

    def __init__(self, send: Send, lost: Callable[[str], None]) -> None:
        """`lost(instance_id)` is called for a peer that does not answer, and so misses messages."""
        self._send_message = send
        self._lost = lost
        self._waiting: dict[str, deque[tuple[str, Wire]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, instance_id: str, address: str, message: Wire) -> None:
        """Queue a message without waiting."""
        waiting = self._waiting.setdefault(instance_id, deque())
        if len(waiting) >= _WAITING_MAX:
            log.warning("%s accepts no messages; dropped %d", instance_id, len(waiting))
            waiting.clear()
            self._lost(instance_id)
            return
        waiting.append((address, message))
        if instance_id not in self._tasks:
            self._tasks[instance_id] = run_once(
                "bid-ask messages", partial(self._deliver, instance_id), instance_id
            )

    async def close(self) -> None:
        """Drop all queued messages."""
        await cancel(*self._tasks.values())

    async def _deliver(self, instance_id: str) -> None:
        waiting, failed = self._waiting[instance_id], False
        try:
            while waiting:
                address, message = waiting.popleft()
                await self._send_message(address, message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            log.info("no message reaches %s: %s", instance_id, format_error(error))
            failed = True
        except Exception as error:  # noqa: BLE001 - the peer must not stay waited for
            loop_failed("bid-ask messages", instance_id, error)
            failed = True
        finally:
            del self._tasks[instance_id]
            del self._waiting[instance_id]
        if failed:
            self._lost(instance_id)
