"""Coordinate bid-ask on one worker: its offers, the requests it wins, and messages to other workers."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import grpc

from tailrace.bid_ask import Bid, Done, Space, Start, Starving
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.v1 import bidask_pb2, bidask_pb2_grpc, migration_pb2, migration_pb2_grpc, types_pb2, worker_pb2
from worker_agent.bidask.bid_receiver import BidReceiver, Fetch, Won
from worker_agent.bidask.messages import PeerQueues, Send, UnknownMessage, Wire, decode
from worker_agent.bidask.offer_sender import OfferSender
from worker_agent.engine.base import Engine, EngineStats
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.target import Imports
from worker_agent.registration import Addressee
from worker_agent.running_requests import RunningRequests

# Workers whose addresses are remembered, to reply to their messages.
_ADDRESSES_MAX: Final = 4_096


class MeantForAnother(Exception):
    """A message to another worker, which had this one's address; the message names both."""


class Coordinator:
    """Route messages; `Sender` and `Receiver` (tailrace/bid_ask.py) decide. Called on the event loop."""

    def __init__(
        self,
        own: Addressee,
        is_here: Callable[[str], bool],
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        fetch: Fetch,
        send: Send,
        outcomes: Counter[str],
    ) -> None:
        """Route messages between the parts.

        `here(request_id)` returns whether a request is on this worker; `space` and `reserved`: see
        `Receiver`; `outcomes` counts the outcomes of offers.
        """
        # This worker's address; set once it serves.
        self.address = ""
        self._own = own
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._peers = PeerQueues(send, self._lost)
        self._offers = OfferSender(own.instance_id, is_here, self._post, outcomes)
        self._receiver = BidReceiver(own.instance_id, space, reserved, fetch, self._post)

    @property
    def on_offer(self) -> int:
        """Return the number of requests on offer."""
        return len(self._offers)

    @property
    def to_fetch(self) -> int:
        """Return the number of requests that were won but are not here yet."""
        return len(self._receiver)

    async def close(self) -> None:
        """Stop offering and fetching."""
        self._offers.close()
        await self._receiver.close()
        await self._peers.close()

    async def offer(self, request: bidask_pb2.OfferRequest) -> bidask_pb2.OfferReply:
        """Offer a request for the scheduler; return once the offer is over."""
        return await self._offers.offer(request)

    def take(self, wire: Wire) -> None:
        """Handle another worker's message. Raise UnknownMessage or MeantForAnother."""
        if refusal := self._own.refusal(wire.receiver_id):
            raise MeantForAnother(refusal)
        if not wire.sender_id or not wire.sender_address:
            raise UnknownMessage("no sender")
        self._addresses[wire.sender_id] = wire.sender_address
        self._addresses.move_to_end(wire.sender_id)
        if len(self._addresses) > _ADDRESSES_MAX:
            self._addresses.popitem(last=False)
        if wire.HasField("no_bid"):
            self._offers.no_bid(wire.sender_id, wire.request_id)
            return
        message = decode(wire)
        if isinstance(message, Bid | Start | Starving | Done):
            self._offers.take(message)
        else:
            self._receiver.take(message, wire)

    def _post(self, instance_id: str, address: str, wire: Wire) -> None:
        address = address or self._addresses.get(instance_id, "")
        if address:
            wire.sender_id, wire.sender_address = self._own.instance_id, self.address
            wire.receiver_id = instance_id
            self._peers.send(instance_id, address, wire)

    def _lost(self, instance_id: str) -> None:
        self._offers.lost(instance_id)
        self._receiver.lost(instance_id)


log = logging.getLogger(__name__)

# Longer than waiting for admission and copying, both of which the migration service ends before.
_MIGRATE_S: Final = 40.0


def fetch_over(instance_id: str, channels: Channels, service: Callable[[], str | None]) -> Fetch:
    """Return a function that has the migration service move a won request here.

    `service()` returns the address of that service while there is one.
    """

    async def fetch(won: Won) -> bool:
        address = service()
        if address is None:
            return False
        award, moved = won.award, False
        request = migration_pb2.MigrateRequest(
            request_id=won.request_id,
            source_instance_id=won.sender,
            target_instance_id=instance_id,
            from_epoch=award.from_epoch,
            reason=award.reason,
            policy=award.policy,
            mode=worker_pb2.COPY_MODE_PRE_COPY,
            traceparent=award.traceparent,
        )
        only = migration_pb2.MigrateManyRequest(migrations=[migration_pb2.NumberedMigration(request=request)])
        stub = migration_pb2_grpc.MigrationStub(channels.get(address, Role.MIGRATION))
        call = stub.Migrate(iter([only]), timeout=_MIGRATE_S)
        try:
            async for reply in call:
                for end in decoded(reply, f"the migration service at {address}").ended:
                    moved = end.record.state == types_pb2.MIGRATION_STATE_COMMITTED
                    if end.code:
                        log.info("%s was not fetched: %s", won.request_id, end.error)
        except grpc.aio.AioRpcError as error:
            log.info("%s was not fetched: %s", won.request_id, error.details())
            return False
        finally:
            call.cancel()
        return moved

    return fetch


class BidAskServicer(bidask_pb2_grpc.BidAskServicer):
    """Implement the BidAsk service."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Offer(
        self,
        request: bidask_pb2.OfferRequest,
        context: grpc.aio.ServicerContext[bidask_pb2.OfferRequest, bidask_pb2.OfferReply],
    ) -> bidask_pb2.OfferReply:
        """Offer a request; reply once the offer is over."""
        if not request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty")
        return await self._coordinator.offer(request)

    async def Tell(
        self,
        request: bidask_pb2.BidAskMessage,
        context: grpc.aio.ServicerContext[bidask_pb2.BidAskMessage, bidask_pb2.BidAskReply],
    ) -> bidask_pb2.BidAskReply:
        """Process a message at once; the reply to it is a message of its own."""
        try:
            self._coordinator.take(request)
        except UnknownMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown message: {error}")
        except MeantForAnother as error:
            # The sender takes it for lost, which the one that it meant is.
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return bidask_pb2.BidAskReply()


_SEND_S: Final = 2.0


def coordinator_of(
    own: Addressee,
    engine: Engine,
    block_tokens: int,
    running: RunningRequests,
    imports: Imports,
    channels: Channels,
    migration_service: Callable[[], str | None],
    metrics: WorkerMetrics,
    draining: Callable[[], bool],
) -> Coordinator:
    """Build the coordinator; its own address has to be set later.

    `migration_service()` returns the service's address while there is one. A `draining` instance does not
    bid.
    """

    def is_here(request_id: str) -> bool:
        return running.by_id(request_id) is not None

    def space() -> Space:
        known = space_of(engine.stats(), block_tokens)
        return replace(known, free_tokens=0) if draining() else known

    return Coordinator(
        own,
        is_here,
        space,
        lambda request_id: imports.reserved(request_id) or is_here(request_id),
        fetch_over(own.instance_id, channels, migration_service),
        send_over(channels),
        metrics.offers,
    )


def space_of(stats: EngineStats, block_tokens: int) -> Space:
    """Return the room for a request, less a block for it to grow into, and the KV held and queued."""
    free = stats.kv_blocks_total - stats.kv_blocks_used - 1
    held = stats.kv_blocks_used * block_tokens
    return Space(free * block_tokens, held + stats.prefill_backlog_tokens)


def send_over(channels: Channels) -> Send:
    """Return a function that sends messages by gRPC, each with a deadline."""

    async def send(address: str, message: Wire) -> None:
        await bidask_pb2_grpc.BidAskStub(channels.get(address, Role.WORKER)).Tell(message, timeout=_SEND_S)

    return send
