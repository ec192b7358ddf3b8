"""The scheduler orders an instance to copy a prefix, and counts the copy until it is reported."""

from __future__ import annotations

import grpc
import pytest

from scheduler_svc.actuator import WorkerCalls
from scheduler_svc.admin.errors import AdminError
from tailrace.actions import CopyPrefix
from tailrace.cluster import Arrival
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from tests.scheduler.facts import instance, set_members
from tests.static_members import StaticMembers

COPY = CopyPrefix("q", "a", "b", 48, "test")


class Target(cache_pb2_grpc.CacheServicer):
    """A target that accepts every copy request."""

    def __init__(self) -> None:
        self.requests: list[cache_pb2.CopyRequest] = []

    async def Copy(
        self,
        request: cache_pb2.CopyRequest,
        context: grpc.aio.ServicerContext[cache_pb2.CopyRequest, cache_pb2.CopyReply],
    ) -> cache_pb2.CopyReply:
        self.requests.append(request)
        return cache_pb2.CopyReply(outcome="pulled", blocks=3)


def two_requests(address: str) -> ReportedCluster:
    """Return a state with two requests on `a` that share three blocks."""
    state = ReportedCluster()
    members = {"a": instance("a", "127.0.0.1:7"), "b": instance("b", address), "c": instance("c", address)}
    set_members(state, StaticMembers(instances=members), 0.0)
    state.hot.track(1e9)
    for name in "rq":
        arrival = Arrival(name, 50, 100, 0, block_names=(1, 2, 3), block_tokens=16)
        state.place(arrival, "a", 0.0)
        state.hot.arrived(arrival, 0.0)
    return state


async def test_the_target_gets_the_order_and_the_copy_counts() -> None:
    target, channels = Target(), Channels()  # type: ignore[abstract]
    servicer = Servicer(cache_pb2_grpc.add_CacheServicer_to_server, target, "tailrace.v1.Cache")
    async with serve_grpc("127.0.0.1:0", [servicer]) as server:
        state = two_requests(server.address)
        copier = WorkerCalls(state, channels)
        work = copier.copy(COPY)
        hot = state.hot_prefixes(0.0)
        assert hot is not None and hot.copying == {"b"}
        (prefix,) = hot.prefixes
        assert (prefix.tokens, prefix.hits, prefix.requests) == (48, 2, {"a": "q"})
        assert prefix.cached["b"].device == 48 and not prefix.cached["b"].reported
        with pytest.raises(AdminError, match="is receiving a copy already"):
            await copier.copy(COPY)
        assert await work == "pulled"
        (sent,) = target.requests
        assert (sent.request_id, sent.holder_instance_id, sent.tokens) == ("q", "a", 48)
        assert sent.holder_address == "127.0.0.1:7"
    await channels.close()


@pytest.mark.parametrize(
    "copy",
    [
        CopyPrefix("unknown", "a", "b", 48, "test"),
        CopyPrefix("q", "c", "b", 48, "test"),
        CopyPrefix("q", "a", "gone", 48, "test"),
    ],
)
async def test_an_outdated_order_is_refused(copy: CopyPrefix) -> None:
    channels = Channels()
    with pytest.raises(AdminError):
        await WorkerCalls(two_requests("127.0.0.1:9"), channels).copy(copy)
    await channels.close()


async def test_a_copy_to_a_lost_target_no_longer_counts() -> None:
    channels = Channels()
    async with serve_grpc("127.0.0.1:0", []) as server:
        state = two_requests(server.address)
        with pytest.raises(AdminError):
            await WorkerCalls(state, channels).copy(COPY)
    (copy,) = state.hot.copies
    hot = state.hot_prefixes(copy.until_s)
    assert hot is not None and not hot.copying
    await channels.close()
