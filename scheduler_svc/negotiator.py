"""Has a request's worker find who takes it over (bid-ask), where the policy leaves that to the workers."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Final

import grpc

from scheduler_svc.refused import Refused
from scheduler_svc.traceparents import Traceparents
from tailrace.actions import Offer
from tailrace.bid_ask import OFFER_S
from tailrace.cluster import RequestView
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.v1 import bidask_pb2, bidask_pb2_grpc

log = logging.getLogger(__name__)

# Longer than a worker keeps a request on offer.
_OFFER_S: Final = OFFER_S + 15.0


class CannotNegotiate(Exception):
    """The request's worker does not speak bid-ask."""


class Negotiator:
    """At most one open migration a request, whoever settles it."""

    def __init__(self, state: ReportedCluster, channels: Channels, traceparents: Traceparents) -> None:
        self._state = state
        self._channels = channels
        self._traceparents = traceparents

    def offer(self, request: RequestView, offer: Offer, policy: str) -> Coroutine[None, None, bool]:
        """Count the migration in at once; to await: whether one of those who are asked has the request.

        Raises Refused, at once too; CannotNegotiate when awaited.
        """
        source = self._state.tracked(request.instance_id)
        receivers = [
            bidask_pb2.Receiver(instance_id=name, address=tracked.record.address)
            for name in offer.receiver_ids
            if (tracked := self._state.tracked(name)) is not None
            and self._state.can_exchange_kv(request.instance_id, name)
        ]
        if source is None or not receivers:
            raise Refused(grpc.StatusCode.NOT_FOUND, "nobody to offer the request to")
        if not self._state.migration_opened(request, None):
            raise Refused(
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
            reply = await stub.Offer(offered, timeout=_OFFER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise CannotNegotiate(source.instance_id) from error
            raise Refused(error.code(), error.details() or error.code().name) from error
        finally:
            self._state.migration_closed(offered.request_id)
        if not reply.taker_instance_id:
            log.debug("%s stays on %s: %s", offered.request_id, source.instance_id, reply.reason)
        return bool(reply.taker_instance_id)
