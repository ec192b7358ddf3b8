"""Convert between the messages of the bid-ask rules and protobuf."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import grpc

from tailrace.bid_ask import (
    Ask,
    Award,
    Bid,
    Busy,
    Done,
    Grant,
    Start,
    Starving,
    ToReceiver,
    ToSender,
    Withdraw,
)
from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, run_once
from tailrace.telemetry.incidents import loop_failed
from tailrace.v1 import bidask_pb2

Message = ToReceiver | ToSender
Wire = bidask_pb2.BidAskMessage


class UnknownMessage(ValueError):
    """Not a message of this protocol."""


def encode(message: Message) -> Wire:
    """Encode a message without its sender. The caller adds an Award's details."""
    wire = Wire(request_id=message.request_id)
    match message:
        case Ask():
            wire_ask = bidask_pb2.Ask(
                tokens=message.tokens, load=message.load, most_tokens=message.most_tokens
            )
            wire.ask.CopyFrom(wire_ask)
        case Bid():
            wire.bid.CopyFrom(bidask_pb2.Bid(load=message.load, earliest_s=message.earliest_s))
        case Award():
            award = bidask_pb2.Award(
                tokens=message.tokens, priority=message.priority, most_tokens=message.most_tokens
            )
            wire.award.CopyFrom(award)
        case Done():
            wire.done.CopyFrom(bidask_pb2.Done(accepted=message.accepted))
        case Start():
            wire.start.SetInParent()
        case Busy():
            wire.busy.SetInParent()
        case Starving():
            wire.starving.SetInParent()
        case Grant():
            wire.grant.SetInParent()
        case Withdraw():
            wire.withdraw.SetInParent()
    return wire


def no_bid(request_id: str) -> Wire:
    """Build the reply of a receiver that does not bid."""
    wire = Wire(request_id=request_id)
    wire.no_bid.SetInParent()
    return wire


def decode(wire: Wire) -> Message:
    """Decode a message for the rules; NoBid is not one of them. Raise UnknownMessage."""
    body = wire.WhichOneof("body")
    reader = _READERS.get(body) if body is not None else None
    if reader is None:
        raise UnknownMessage(str(body))
    return reader(wire)


def _limit(body: bidask_pb2.Ask | bidask_pb2.Award) -> int | None:
    return body.most_tokens if body.HasField("most_tokens") else None


_READERS: Final[Mapping[str, Callable[[Wire], Message]]] = {
    "ask": lambda w: Ask(w.sender_id, w.request_id, w.ask.tokens, w.ask.load, _limit(w.ask)),
    "bid": lambda w: Bid(w.sender_id, w.request_id, w.bid.load, w.bid.earliest_s),
    "award": lambda w: Award(w.sender_id, w.request_id, w.award.tokens, w.award.priority, _limit(w.award)),
    "start": lambda w: Start(w.sender_id, w.request_id),
    "busy": lambda w: Busy(w.sender_id, w.request_id),
    "starving": lambda w: Starving(w.sender_id, w.request_id),
    "grant": lambda w: Grant(w.sender_id, w.request_id),
    "withdraw": lambda w: Withdraw(w.sender_id, w.request_id),
    "done": lambda w: Done(w.sender_id, w.request_id, w.done.accepted),
}


log = logging.getLogger(__name__)

_WAITING_MAX: Final = 1_024

# Sends to an address; raises grpc.aio.AioRpcError.
Send = Callable[[str, Wire], Awaitable[object]]


class PeerQueues:
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
