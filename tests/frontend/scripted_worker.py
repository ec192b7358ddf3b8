"""A worker over real gRPC that says what a test tells it to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from tailrace.v1 import worker_pb2, worker_pb2_grpc
from tailrace.wire import (
    EngineCoreOutput,
    FinishReason,
    ReadyResponse,
    encode_outputs,
    read_utility,
    utility_result,
    write_ready,
)

READY = write_ready(
    ReadyResponse(
        max_model_len=8192,
        num_gpu_blocks=1024,
        block_size=16,
        dp_stats_address=None,
        dtype="float32",
        vllm_version="0.32.0",
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        instance_id="scripted",
        supports_lora=False,
        max_loras=0,
    )
)
FINISHED, PREFILL_DONE, REASONING_ENDED, FAILED = 1, 2, 4, 8
# What engine cores answer to the calls that front halves make at their start.
UTILITY_RESULTS: dict[str, object] = {"get_supported_tasks": ["generate"], "is_sleeping": False}
WAIT_S = 10.0


def outputs(
    submit: worker_pb2.Submit,
    token_ids: Sequence[int],
    first: int,
    flags: int = 0,
    epoch: int | None = None,
) -> worker_pb2.AttachDown:
    """One request's outputs in one step."""
    reason = FinishReason.ERROR if flags & FAILED else FinishReason.STOP
    output = EngineCoreOutput(
        submit.request_id, list(token_ids), finish_reason=reason if flags & (FINISHED | FAILED) else None
    )
    return worker_pb2.AttachDown(
        outputs=worker_pb2.StepOutputs(
            frames=encode_outputs([output]),
            handles=[submit.handle],
            epochs=[submit.epoch if epoch is None else epoch],
            first_indices=[first],
            counts=[len(token_ids)],
            token_ids=token_ids,
            flags=[flags],
        )
    )


def merge(*messages: worker_pb2.AttachDown, frames: list[bytes]) -> worker_pb2.AttachDown:
    """Several requests' outputs as one step."""
    step = worker_pb2.StepOutputs()
    for message in messages:
        step.MergeFrom(message.outputs)
    del step.frames[:]
    step.frames.extend(frames)
    return worker_pb2.AttachDown(outputs=step)


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Hands what it receives to the test, answers utilities, beats until told to be silent."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.address = ""
        self.received: asyncio.Queue[worker_pb2.AttachUp] = asyncio.Queue()
        self.silent = False
        self._down: asyncio.Queue[worker_pb2.AttachDown] | None = None

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.AttachUp], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.AttachDown]:
        """The data path."""
        down: asyncio.Queue[worker_pb2.AttachDown] = asyncio.Queue()
        self._down = down
        hello = worker_pb2.WorkerHello(instance_id=self.instance_id, incarnation="1", ready_response=READY)
        yield worker_pb2.AttachDown(hello=hello)
        reader = asyncio.create_task(self._read(requests, down))
        try:
            while True:
                try:
                    async with asyncio.timeout(0.5):
                        message = await down.get()
                except TimeoutError:
                    if self.silent:
                        continue
                    message = worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat())
                yield message
        finally:
            reader.cancel()

    def say(self, message: worker_pb2.AttachDown) -> None:
        """Send on the open stream."""
        assert self._down is not None
        self._down.put_nowait(message)

    async def expect(self, kind: str) -> worker_pb2.AttachUp:
        """The next message of this kind; others before it are passed over."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.received.get()
                if message.WhichOneof("body") == kind:
                    return message

    async def submitted(self) -> worker_pb2.Submit:
        """The next request."""
        return (await self.expect("submit")).submit

    async def on_submit(self, submit: worker_pb2.Submit) -> None:
        """For subclasses that answer by themselves."""

    async def _read(
        self, requests: AsyncIterator[worker_pb2.AttachUp], down: asyncio.Queue[worker_pb2.AttachDown]
    ) -> None:
        async for message in requests:
            match message.WhichOneof("body"):
                case "hello" | "heartbeat":
                    pass
                case "utility":
                    call = read_utility(list(message.utility.frames))
                    frames = utility_result(call.call_id, UTILITY_RESULTS.get(call.method))
                    answer = worker_pb2.UtilityResult(call_id=message.utility.call_id, frames=frames)
                    down.put_nowait(worker_pb2.AttachDown(utility=answer))
                case _:
                    self.received.put_nowait(message)
                    if message.HasField("submit"):
                        await self.on_submit(message.submit)


@asynccontextmanager
async def serving(worker: ScriptedWorker) -> AsyncIterator[grpc.aio.Server]:
    """The worker on a free port; `stop(None)` of the server is its crash."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)
