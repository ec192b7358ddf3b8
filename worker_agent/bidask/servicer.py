"""The BidAsk service over gRPC."""

from __future__ import annotations

import grpc

from tailrace.v1 import bidask_pb2, bidask_pb2_grpc
from worker_agent.bidask.coordinator import Coordinator
from worker_agent.bidask.messages import UnknownMessage


class BidAskServicer(bidask_pb2_grpc.BidAskServicer):
    """One worker's."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Offer(
        self,
        request: bidask_pb2.OfferRequest,
        context: grpc.aio.ServicerContext[bidask_pb2.OfferRequest, bidask_pb2.OfferReply],
    ) -> bidask_pb2.OfferReply:
        """When it is over."""
        if not request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty")
        return await self._coordinator.offer(request)

    async def Tell(
        self,
        request: bidask_pb2.BidAskMessage,
        context: grpc.aio.ServicerContext[bidask_pb2.BidAskMessage, bidask_pb2.BidAskReply],
    ) -> bidask_pb2.BidAskReply:
        """Taken at once; the answer is a message of its own."""
        try:
            self._coordinator.take(request)
        except UnknownMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no such message: {error}")
        return bidask_pb2.BidAskReply()
