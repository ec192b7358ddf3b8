"""A front end in this process: submits requests to a vLLM engine and checks that tokens arrive in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from tailrace.output_flags import OutputFlag
from worker_agent.engine.base import Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.vllm.engine import VllmEngine

_DEADLINE_S = 300.0
# If the event loop reads nothing for this long, it waits for the engine itself.
_READ_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Stream:
    """One request and its tokens."""

    key: RequestKey
    request_id: str
    frames: list[bytes]
    epoch: int = 1
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    failed: bool = False


class Sink:
    """EngineSink; `dead` is set if a token is out of order."""

    def __init__(self) -> None:
        self.dead = ""
        self._streams: dict[int, Stream] = {}
        self._encoder = MsgpackEncoder()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def on_step(self, columns: StepColumns) -> None:
        """Process a step. The engine's thread waits for that, so that no request ends while a busy machine
        keeps the loop from migrating it."""
        read = threading.Event()

        def process_step() -> None:
            self._process_step(columns)
            read.set()

        self._loop.call_soon_threadsafe(process_step)
        read.wait(_READ_TIMEOUT_S)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Ignore results of utility calls: there are none."""

    def on_engine_dead(self, reason: str) -> None:
        """Record that the engine has died."""
        self.dead = reason
        self._changed.set()

    def submit(self, engine: VllmEngine, prompt: list[int], params: SamplingParams) -> Stream:
        """Submit a new request."""
        handle = len(self._streams) + 1
        name = f"stream-{handle}"
        request = EngineCoreRequest(name, prompt, None, params, None, time.time(), None, None, None)
        stream = Stream(RequestKey(0, handle), name, [bytes(part) for part in self._encoder.encode(request)])
        self._streams[handle] = stream
        self.resubmit(engine, stream)
        return stream

    def resubmit(self, engine: VllmEngine, stream: Stream) -> None:
        """Submit the request again, to be computed from its tokens."""
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

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raise RuntimeError if the engine dies, TimeoutError after five minutes."""
        async with asyncio.timeout(_DEADLINE_S):
            while not condition():
                if self.dead:
                    raise RuntimeError(self.dead)
                self._changed.clear()
                await self._changed.wait()

    def _process_step(self, columns: StepColumns) -> None:
        offset = 0
        for handle, epoch, first, count, flags in zip(
            columns.handles, columns.epochs, columns.first_indices, columns.counts, columns.flags, strict=True
        ):
            stream = self._streams[handle]
            offset += count
            if epoch < stream.epoch:
                # In flight when the request was aborted.
                continue
            if (epoch, first) != (stream.epoch, len(stream.tokens)) or stream.finished:
                self.dead = f"{stream.request_id}: token {first} of epoch {epoch} is out of order"
            stream.tokens += columns.token_ids[offset - count : offset]
            stream.finished = OutputFlag.FINISHED in OutputFlag(flags)
            stream.failed = stream.failed or OutputFlag.FAILED in OutputFlag(flags)
        self._changed.set()
