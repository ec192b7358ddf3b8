"""Offers that the scheduler passes to workers."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from scheduler_svc.actuator import WorkerCalls
from scheduler_svc.admin.errors import AdminError
from tailrace.actions import Offer
from tailrace.control.events import MigrationOpened
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import bidask_pb2, bidask_pb2_grpc
from tests.scheduler.facts import instance, report_to, request, set_members, steady
from tests.static_members import StaticMembers


class Worker(bidask_pb2_grpc.BidAskServicer):
    """A worker that answers offers with `taker`, which may be empty."""

    def __init__(self, taker: str) -> None:
        self.taker = taker
        self.offered: list[bidask_pb2.OfferRequest] = []

    async def Offer(
        self,
        request: bidask_pb2.OfferRequest,
        context: grpc.aio.ServicerContext[bidask_pb2.OfferRequest, bidask_pb2.OfferReply],
    ) -> bidask_pb2.OfferReply:
        self.offered.append(request)
        return bidask_pb2.OfferReply(taker_instance_id=self.taker)

    async def Tell(
        self,
        request: bidask_pb2.BidAskMessage,
        context: grpc.aio.ServicerContext[bidask_pb2.BidAskMessage, bidask_pb2.BidAskReply],
    ) -> bidask_pb2.BidAskReply:
        raise NotImplementedError("the scheduler sends no bid-ask messages")


def cluster(address: str) -> ReportedCluster:
    """Return a state with request r on a, which listens at `address`, and instances b and c."""
    state = ReportedCluster()
    fleet = {"a": instance("a", address), "b": instance("b"), "c": instance("c")}
    set_members(state, StaticMembers(instances=fleet), 0.0)
    reported = request("r", epoch=3, output_tokens=20)
    reported.traceparent = "00-1-2-01"
    report_to(state, steady("a", [reported]), 1.0)
    return state


@pytest.mark.parametrize("taker", ["b", ""])
async def test_the_source_gets_the_complete_offer(taker: str) -> None:
    worker, channels = Worker(taker), Channels()
    servicer = Servicer(bidask_pb2_grpc.add_BidAskServicer_to_server, worker, "tailrace.v1.BidAsk")
    async with serve_grpc("127.0.0.1:0", [servicer]) as server:
        state = cluster(server.address)
        negotiator = WorkerCalls(state, channels)
        moving = state.request("r")
        assert moving is not None
        order = Offer("r", "a", ("b", "c", "stranger"), "length boundary", 5_000)
        moved = await negotiator.offer(moving, order, "cascade")
        assert moved is bool(taker)
        (offer,) = worker.offered
        assert (offer.request_id, offer.from_epoch, offer.tokens) == ("r", 3, 120)
        assert [r.instance_id for r in offer.receivers] == ["b", "c"]
        assert offer.most_tokens == 5_000
        assert (offer.reason, offer.policy, offer.traceparent) == ("length boundary", "cascade", "00-1-2-01")
        # It may be migrated again.
        assert state.order(MigrationOpened(moving, None))
        with pytest.raises(AdminError, match="is open"):
            await negotiator.offer(dataclasses.replace(moving), Offer("r", "a", ("b",), "load"), "cascade")
    await channels.close()
