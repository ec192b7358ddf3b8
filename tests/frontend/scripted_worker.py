"""A worker over a real connection that sends what the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tailrace.service.message_stream import MessageStream, StreamBroken, serve_streams
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import EngineCoreOutput, FinishReason, encode_outputs
from tailrace.wire.ready import ReadyResponse, write_ready
from tailrace.wire.requests import read_utility, utility_result
from tests.frontend.fleet import MODEL
from tests.waiting import WAIT_S

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
# Replies of engine cores to the calls that API servers make at startup.
UTILITY_RESULTS: dict[str, object] = {"get_supported_tasks": ["generate"], "is_sleeping": False}


def outputs(
    submit: worker_pb2.Submit,
    token_ids: Sequence[int],
    first: int,
    flags: int = 0,
    epoch: int | None = None,
) -> worker_pb2.AttachDown:
    """Return the message of a step with outputs of one request."""
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


def taken_message(submit: worker_pb2.Submit) -> worker_pb2.AttachDown:
    """Return the message that the engine has accepted the request."""
    return worker_pb2.AttachDown(taken=worker_pb2.Taken(handle=submit.handle, epoch=submit.epoch))


def merge(*messages: worker_pb2.AttachDown, frames: list[bytes]) -> worker_pb2.AttachDown:
    """Combine messages of single requests to one step with these frames."""
    step = worker_pb2.StepOutputs()
    for message in messages:
        step.MergeFrom(message.outputs)
    del step.frames[:]
    step.frames.extend(frames)
    return worker_pb2.AttachDown(outputs=step)


class ScriptedWorker:
    """Worker that queues received messages for the test, answers utility calls and sends heartbeats."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.address = ""
        self.received: asyncio.Queue[worker_pb2.AttachUp] = asyncio.Queue()
        # Whether to stop sending heartbeats.
        self.silent = False
        # Whether to confirm that the engine has accepted a submission.
        self.confirms = True
        # The message limit announced in the hello, in bytes; 0: none.
        self.max_message_bytes = 0
        # Key of the model announced in the hello.
        self.model = MODEL.key
        self._down: asyncio.Queue[worker_pb2.AttachDown] | None = None
        self._streams: list[MessageStream[worker_pb2.AttachUp]] = []
        self._crashed = False

    async def serve(self, stream: MessageStream[worker_pb2.AttachUp]) -> None:
        """Serve one connection of the data path."""
        if self._crashed:
            return
        down: asyncio.Queue[worker_pb2.AttachDown] = asyncio.Queue()
        self._down = down
        self._streams.append(stream)
        hello = worker_pb2.WorkerHello(
            instance_id=self.instance_id,
            incarnation="1",
            ready_response=READY,
            max_message_bytes=self.max_message_bytes,
            model=self.model,
        )
        await stream.write(worker_pb2.AttachDown(hello=hello))
        reader = asyncio.create_task(self._read(stream, down))
        try:
            while not reader.done():
                try:
                    async with asyncio.timeout(0.5):
                        message = await down.get()
                except TimeoutError:
                    if self.silent:
                        continue
                    message = worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat())
                await stream.write(message)
        except StreamBroken:
            return
        finally:
            reader.cancel()

    @property
    def connections(self) -> int:
        """Return how many connections there have been."""
        return len(self._streams)

    def hang_up(self) -> None:
        """Break the connections; the worker stays alive and accepts new ones."""
        for stream in self._streams:
            stream.close()

    def crash(self) -> None:
        """Break the connections and accept no new ones."""
        self._crashed = True
        for stream in self._streams:
            stream.close()

    def send(self, message: worker_pb2.AttachDown) -> None:
        """Send a message on the latest connection."""
        assert self._down is not None
        self._down.put_nowait(message)

    async def expect(self, kind: str) -> worker_pb2.AttachUp:
        """Return the next message of this kind and drop others before it. Raise TimeoutError after WAIT_S."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.received.get()
                if message.WhichOneof("body") == kind:
                    return message

    async def submitted(self) -> worker_pb2.Submit:
        """Return the next submission."""
        return (await self.expect("submit")).submit

    async def on_submit(self, submit: worker_pb2.Submit) -> None:
        """Handle a submission; for subclasses that answer requests."""

    async def _read(
        self, stream: MessageStream[worker_pb2.AttachUp], down: asyncio.Queue[worker_pb2.AttachDown]
    ) -> None:
        while (message := await stream.read()) is not None:
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
                        if self.confirms:
                            down.put_nowait(taken_message(message.submit))
                        await self.on_submit(message.submit)


@asynccontextmanager
async def serving(worker: ScriptedWorker) -> AsyncIterator[Callable[[], None]]:
    """Serve the worker on a free port and yield a function that crashes it."""
    async with AsyncExitStack() as stack:
        worker.address = await stack.enter_async_context(
            serve_streams("127.0.0.1:0", worker_pb2.AttachUp, worker.serve)
        )
        yield worker.crash
