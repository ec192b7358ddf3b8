"""A front end in this process: submits requests to a vLLM engine and takes tokens in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from worker_agent.engine.base import Frames, OutputFlag, RequestKey, StepColumns, Submission
from worker_agent.engine.vllm.engine import VllmEngine

_DEADLINE_S = 300.0
# A loop that reads nothing for so long waits for the engine itself.
_READ_S = 1.0


@dataclass(slots=True)
class Stream:
    """One request and what came of it."""

    key: RequestKey
    request_id: str
    frames: list[bytes]
    epoch: int = 1
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    failed: bool = False


class Sink:
    """EngineSink. A token that is out of order ends it: `dead` says so."""

    def __init__(self) -> None:
        self.dead = ""
        self._streams: dict[int, Stream] = {}
        self._encoder = MsgpackEncoder()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def on_step(self, columns: StepColumns) -> None:
        """EngineSink.on_step. The engine's thread waits for the reader: no request ends while a busy machine
        keeps the loop from moving it."""
        read = threading.Event()

        def take() -> None:
            self._take(columns)
            read.set()

        self._loop.call_soon_threadsafe(take)
        read.wait(_READ_S)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """EngineSink.on_utility: nobody asks."""

    def on_engine_dead(self, reason: str) -> None:
        """EngineSink.on_engine_dead."""
        self.dead = reason
        self._changed.set()

    def submit(self, engine: VllmEngine, prompt: list[int], params: SamplingParams) -> Stream:
        """A new request."""
        handle = len(self._streams) + 1
        name = f"stream-{handle}"
        request = EngineCoreRequest(name, prompt, None, params, None, time.time(), None, None, None)
        stream = Stream(RequestKey(0, handle), name, [bytes(part) for part in self._encoder.encode(request)])
        self._streams[handle] = stream
        self.resubmit(engine, stream)
        return stream

    def resubmit(self, engine: VllmEngine, stream: Stream) -> None:
        """The request as it is now, to be computed from its tokens."""
        engine.submit(
            Submission(
                stream.key,
                stream.request_id,
                stream.epoch,
                stream.frames,
                list(stream.tokens),
                traceparent="",
                frontend_id="models",
            )
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it. Raises RuntimeError when the engine dies, TimeoutError after five minutes."""
        async with asyncio.timeout(_DEADLINE_S):
            while not condition():
                if self.dead:
                    raise RuntimeError(self.dead)
                self._changed.clear()
                await self._changed.wait()

    def _take(self, columns: StepColumns) -> None:
        offset = 0
        for handle, epoch, first, count, flags in zip(
            columns.handles, columns.epochs, columns.first_indices, columns.counts, columns.flags, strict=True
        ):
            stream = self._streams[handle]
            offset += count
            if epoch < stream.epoch:
                # What was on its way when the request was given up here.
                continue
            if (epoch, first) != (stream.epoch, len(stream.tokens)) or stream.finished:
                self.dead = f"{stream.request_id}: token {first} of epoch {epoch} is out of order"
            stream.tokens += columns.token_ids[offset - count : offset]
            stream.finished = OutputFlag.FINISHED in OutputFlag(flags)
            stream.failed = stream.failed or OutputFlag.FAILED in OutputFlag(flags)
        self._changed.set()
