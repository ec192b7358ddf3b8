"""The target's stream to its source."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tailrace.v1 import worker_pb2
from worker_agent.migration.export_call import SourceLink


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
