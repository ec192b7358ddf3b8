"""What the scheduler has workers do: offer a request, return waiting prompts, copy a prefix."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Coroutine
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.loop import Traceparents
from tailrace.actions import CopyPrefix, Offer
from tailrace.bid_ask import OFFER_S
from tailrace.cluster import RequestView
from tailrace.control.events import CopyOrdered, CopySettled, MigrationClosed, MigrationOpened
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.v1 import bidask_pb2, bidask_pb2_grpc, cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


async def _reply(call: Awaitable[M], address: str) -> M:
    """Return a worker's reply. Raise AdminError."""
    try:
        return decoded(await call, address)
    except grpc.aio.AioRpcError as error:
        raise AdminError(error.code(), error.details() or error.code().name) from error


# Longer than a worker keeps an offer open.
_OFFER_S: Final = OFFER_S + 15.0


class Negotiator:
    """Have a request's worker find the instance that takes it over by bid-ask, if the policy leaves that to
    workers.

    At most one open migration per request.
    """

    def __init__(self, state: ReportedCluster, channels: Channels, traceparents: Traceparents) -> None:
        self._state = state
        self._channels = channels
        self._traceparents = traceparents

    def offer(self, request: RequestView, offer: Offer, policy: str) -> Coroutine[None, None, bool]:
        """Enter the migration into the model; return a coroutine for whether one of the receivers took the
        request.

        Raise AdminError, immediately or when awaited.
        """
        source = self._state.tracked(request.instance_id)
        receivers = [
            bidask_pb2.Receiver(instance_id=name, address=tracked.record.address)
            for name in offer.receiver_ids
            if (tracked := self._state.tracked(name)) is not None
            and self._state.can_exchange_kv(request.instance_id, name)
        ]
        if source is None or not receivers:
            raise AdminError(grpc.StatusCode.NOT_FOUND, "no instance to offer the request to")
        if not self._state.order(MigrationOpened(request, None)):
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"request {request.request_id}: a migration of it is open",
            )
        offered = bidask_pb2.OfferRequest(
            request_id=request.request_id,
            from_epoch=request.epoch,
            tokens=request.context_tokens,
            receivers=receivers,
            reason=offer.reason,
            policy=policy,
            most_tokens=offer.most_tokens,
            traceparent=self._traceparents.get(request.request_id)
            or self._state.traceparent(request.request_id),
        )
        return self._offer(source.record, offered)

    async def _offer(self, source: InstanceRecord, offered: bidask_pb2.OfferRequest) -> bool:
        stub = bidask_pb2_grpc.BidAskStub(self._channels.get(source.address, Role.WORKER))
        try:
            reply = await _reply(stub.Offer(offered, timeout=_OFFER_S), source.address)
        finally:
            self._state.apply(MigrationClosed(offered.request_id))
        if not reply.taker_instance_id:
            log.debug("%s stays on %s: %s", offered.request_id, source.instance_id, reply.reason)
        return bool(reply.taker_instance_id)


_CALL_S: Final = 2.0


class PromptReturns:
    """Have instances return waiting prompts, to be placed where the policy now wants them.

    The worker hands them to the front ends, which ask the scheduler; each prompt stays in its queue until
    then.
    """

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels

    async def return_prompts(self, instance_id: str, request_ids: tuple[str, ...]) -> int:
        """Return how many prompts the instance returns: those that still wait. Raise AdminError."""
        tracked = self._state.tracked(instance_id)
        if tracked is None:
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{instance_id} is gone")
        address = tracked.record.address
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(address, Role.WORKER))
        request = worker_pb2.HandBackPromptsRequest(request_ids=request_ids)
        reply = await _reply(stub.HandBackPrompts(request, timeout=_CALL_S), address)
        return int(reply.returned)


# Longer than a worker's default limit of a pull; the worker stops when the call ends.
_COPY_S: Final = 10.0


class Copier:
    """Order prefix copies, at most one per target at a time."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels

    def copy(self, copy: CopyPrefix) -> Coroutine[None, None, str]:
        """Enter the copy into the model; return a coroutine that carries it out and returns the worker's
        outcome.

        Raise AdminError, immediately or when awaited.
        """
        holder, target = self._state.tracked(copy.holder_id), self._state.tracked(copy.target_id)
        ordered = CopyOrdered(copy, time.monotonic())
        if holder is None or target is None or not self._state.order(ordered):
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{copy.target_id} is receiving a copy already, or {copy.holder_id} has no {copy.request_id}",
            )
        request = cache_pb2.CopyRequest(
            request_id=copy.request_id,
            holder_instance_id=copy.holder_id,
            holder_address=holder.record.address,
            tokens=copy.tokens,
            target_instance_id=copy.target_id,
        )
        return self._copy(copy.target_id, target.record.address, request)

    async def _copy(self, target_id: str, address: str, request: cache_pb2.CopyRequest) -> str:
        stub = cache_pb2_grpc.CacheStub(self._channels.get(address, Role.WORKER))
        try:
            reply = await _reply(stub.Copy(request, timeout=_COPY_S), address)
        finally:
            self._state.apply(CopySettled(target_id, time.monotonic()))
        return reply.outcome
