"""The target's stream to its source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from tailrace.v1 import worker_pb2, worker_pb2_grpc
from worker_agent.migration.export_call import SourceFailed, SourceLink


class Call:
    """A call whose answers are there before they are read."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    async def write(self, command: worker_pb2.ExportCommand) -> None:
        pass

    async def done_writing(self) -> None:
        pass

    async def read(self) -> object:
        self.left -= 1
        return worker_pb2.ExportEvent() if self.left >= 0 else grpc.aio.EOF

    def cancel(self) -> None:
        pass


async def test_answers_that_are_there_already_are_each_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link, call = SourceLink(channel, 1.0), Call(3)
        link.drop()
        monkeypatch.setattr(link, "_call", call)
        # An answer to a command that was given up.
        link._read()
        await asyncio.sleep(0)
        await link.end(False, "a test")
    assert call.left == -1


class EndingSource(worker_pb2_grpc.WorkerServicer):
    """A source whose requests end right after the first command."""

    async def Export(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExportCommand],
        context: grpc.aio.ServicerContext[worker_pb2.ExportCommand, worker_pb2.ExportEvent],
    ) -> AsyncIterator[worker_pb2.ExportEvent]:
        await anext(request_iterator)
        yield worker_pb2.ExportEvent(opened=worker_pb2.ExportOpened())
        yield worker_pb2.ExportEvent(failed=worker_pb2.ExportFailed(reason="it ended", gone=True))


async def test_what_a_source_said_before_it_ended_is_heard() -> None:
    """gRPC gives no message any more once a write has failed."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(EndingSource(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(50):
                link = SourceLink(channel, 10.0)
                await link.ask(worker_pb2.ExportCommand(open=worker_pb2.ExportOpen()))
                with pytest.raises(SourceFailed, match="it ended") as failed:
                    await link.ask(worker_pb2.ExportCommand(more=worker_pb2.ExportMore()))
                assert failed.value.gone
                link.drop()
    finally:
        await server.stop(None)
