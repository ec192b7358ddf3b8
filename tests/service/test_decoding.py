"""Requests that cannot be decoded are an error of the caller and do not reach the handler."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from tailrace.service.server import Servicer, serve_grpc
from tailrace.telemetry.incidents import LOOP_FAILURES
from tailrace.v1 import monitor_pb2, monitor_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.waiting import WAIT_S

NO_MESSAGE = b"\x0f"


class Monitor:
    """A servicer that acknowledges reports."""

    async def Report(
        self,
        request_iterator: AsyncIterator[monitor_pb2.WorkerReport],
        context: grpc.aio.ServicerContext[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
    ) -> AsyncIterator[monitor_pb2.ReportAck]:
        async for report in request_iterator:
            yield monitor_pb2.ReportAck(seq=report.seq)

    async def Watch(
        self,
        request: monitor_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[monitor_pb2.WatchRequest, monitor_pb2.StateDelta],
    ) -> AsyncIterator[monitor_pb2.StateDelta]:
        """Meet a bug if the subscriber calls itself "bug"."""
        if request.subscriber == "bug":
            raise ZeroDivisionError
        yield monitor_pb2.StateDelta(snapshot=True)


class Worker:
    """A servicer with the kinds of methods that Monitor lacks."""

    async def CancelImport(
        self,
        request: worker_pb2.CancelImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CancelImportRequest, worker_pb2.CancelImportReply],
    ) -> worker_pb2.CancelImportReply:
        return worker_pb2.CancelImportReply()

    async def Export(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExportCommand],
        context: grpc.aio.ServicerContext[worker_pb2.ExportCommand, worker_pb2.ExportEvent],
    ) -> None:
        """Reply through the context, once per request."""
        async for _ in request_iterator:
            await context.write(worker_pb2.ExportEvent())


@asynccontextmanager
async def _channel() -> AsyncIterator[grpc.aio.Channel]:
    # Their other methods return UNIMPLEMENTED.
    monitor = type("Whole", (Monitor, monitor_pb2_grpc.MonitorServicer), {})()
    worker = type("Whole", (Worker, worker_pb2_grpc.WorkerServicer), {})()
    servicers = [
        Servicer(monitor_pb2_grpc.add_MonitorServicer_to_server, monitor, "tailrace.v1.Monitor"),
        Servicer(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "tailrace.v1.Worker"),
    ]
    async with (
        serve_grpc("127.0.0.1:0", servicers) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield channel


def _raw(data: bytes) -> bytes:
    return data


async def _call(
    channel: grpc.aio.Channel, method: str, requests: Sequence[bytes]
) -> tuple[list[bytes], grpc.StatusCode, str]:
    """Return the replies, status and details of a call."""
    multicallable = channel.stream_stream(
        f"/tailrace.v1.{method}", request_serializer=_raw, response_deserializer=_raw
    )
    call = multicallable(iter(requests), timeout=WAIT_S)
    replies: list[bytes] = []
    try:
        while (reply := await call.read()) is not grpc.aio.EOF:
            assert isinstance(reply, bytes)
            replies.append(reply)
    except grpc.aio.AioRpcError as error:
        return replies, error.code(), error.details() or ""
    return replies, grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    "method", ["Monitor/Report", "Monitor/Watch", "Worker/CancelImport", "Worker/Export"]
)
async def test_an_undecodable_request_is_an_invalid_argument(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _channel() as channel:
        with caplog.at_level(logging.WARNING):
            replies, status, details = await _call(channel, method, [NO_MESSAGE])
        assert (replies, status) == ([], grpc.StatusCode.INVALID_ARGUMENT)
        assert "cannot be decoded" in details
        assert not caplog.records
        # The next request is served.
        replies, status, _ = await _call(channel, method, [b""])
        assert (len(replies), status) == (1, grpc.StatusCode.OK)


@pytest.mark.parametrize("method", ["Monitor/Report", "Worker/Export"])
async def test_requests_before_an_undecodable_one_are_answered(method: str) -> None:
    async with _channel() as channel:
        replies, status, _ = await _call(channel, method, [b"", b"", NO_MESSAGE, b""])
    assert (len(replies), status) == (2, grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_handler_that_fails_unexpectedly_is_counted() -> None:
    failures = LOOP_FAILURES.labels("gRPC calls")
    before = failures._value.get()
    async with _channel() as channel:
        request = monitor_pb2.WatchRequest(subscriber="bug").SerializeToString()
        assert (await _call(channel, "Monitor/Watch", [request]))[1] is grpc.StatusCode.UNKNOWN
        assert failures._value.get() == before + 1
        # A status that a handler gives is no failure.
        assert (await _call(channel, "Worker/HandBackPrompts", [b""]))[1] is grpc.StatusCode.UNIMPLEMENTED
        assert (await _call(channel, "Monitor/Watch", [NO_MESSAGE]))[1] is grpc.StatusCode.INVALID_ARGUMENT
    assert failures._value.get() == before + 1
