"""A front end for tests of the vLLM engine: submits requests, collects and checks their outputs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tailrace.output_flags import OutputFlag
from tests.waiting import WAIT_S
from worker_agent.engine.base import Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.engine import VllmEngine

# Seconds after which the engine stops waiting for the event loop, which may itself wait for the engine.
READ_S = 1.0


@dataclass
class Stream:
    """The outputs of one request so far."""

    key: RequestKey
    request_id: str
    frames: list[bytes]
    epoch: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    flags: list[OutputFlag] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finished: bool = False
    adapter_version: str = ""
    # Why it was not run.
    refusal: EngineRefusal | None = None

    @property
    def all_flags(self) -> OutputFlag:
        """The union of all flags received."""
        seen = OutputFlag.NONE
        for flags in self.flags:
            seen |= flags
        return seen


class Front:
    """The engine's sink, which accepts tokens in order, only from the current epoch, as a front end does."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.utilities: dict[int, list[bytes]] = {}
        self.dead = ""
        # The first output that was not as it must be.
        self.wrong: Exception | None = None
        self._handles = itertools.count(1)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # ---- EngineSink

    def on_step(self, columns: StepColumns) -> None:
        """Block the engine until its outputs are read, so that no request ends before a slow test sees it."""
        read = threading.Event()
        self._loop.call_soon_threadsafe(self._read, columns, read)
        read.wait(READ_S)

    def _read(self, columns: StepColumns, read: threading.Event) -> None:
        try:
            self._take(columns)
        except Exception as error:
            # The event loop would log it, and a test wait in vain for what it has not read.
            self.wrong = self.wrong or error
            self._changed.set()
            raise
        finally:
            read.set()

    def _take(self, columns: StepColumns) -> None:
        message: EngineCoreOutputs = self._decoder.decode(columns.frames)
        offset = 0
        assert len(message.outputs) == len(columns.handles)
        for index, output in enumerate(message.outputs):
            stream = self.streams[columns.handles[index]]
            count = columns.counts[index]
            tokens = columns.token_ids[offset : offset + count]
            offset += count
            assert output.request_id == stream.request_id
            assert list(output.new_token_ids) == tokens
            assert columns.epochs[index] == stream.epoch
            assert columns.first_indices[index] == len(stream.tokens)
            assert not stream.finished
            stream.tokens += tokens
            stream.flags.append(OutputFlag(columns.flags[index]))
            stream.refusal = columns.refusal
            if output.new_logprobs is not None:
                ids, values = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
                stream.logprobs += [
                    dict(zip(row_ids.tolist(), row.tolist(), strict=True))
                    for row_ids, row in zip(ids, values, strict=True)
                ]
            if OutputFlag.FINISHED in stream.flags[-1]:
                stream.finished = True
                stream.finish_reason = output.finish_reason
        assert offset == len(columns.token_ids)
        self._changed.set()

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        self.utilities[call_id] = list(frames)
        self._changed.set()

    def on_engine_dead(self, reason: str) -> None:
        self.dead = reason
        self._changed.set()

    # ---- requests

    def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        waited_s: float = 0.0,
        adapter: tuple[str, int, str] | None = None,
    ) -> Stream:
        """Create a request without submitting it.

        `waited_s`: seconds since its arrival at the fleet. `adapter`: name, number, path.
        """
        handle = next(self._handles)
        request_id = f"request-{handle}"
        lora = LoRARequest(*adapter) if adapter else None
        request = EngineCoreRequest(
            request_id,
            list(prompt),
            None,
            params,
            None,
            time.time() - waited_s,
            lora,
            None,
            None,
            client_index=7,
        )
        frames = [bytes(frame) for frame in self._encoder.encode(request)]
        stream = Stream(RequestKey(0, handle), request_id, frames, epoch=1)
        self.streams[handle] = stream
        return stream

    def submit(self, engine: VllmEngine, stream: Stream, sampling_state: bytes = b"") -> None:
        """Submit a stream, to continue after its tokens."""
        engine.submit(
            Submission(
                stream.key,
                stream.request_id,
                stream.epoch,
                stream.frames,
                list(stream.tokens),
                traceparent="00-trace",
                frontend_id="front",
                sampling_state=sampling_state,
                adapter_version=stream.adapter_version,
            )
        )

    async def until_tokens(self, stream: Stream, number: int) -> None:
        """Wait until the stream has this many tokens and check that it has not ended before."""
        await self.until(lambda: stream.finished or len(stream.tokens) >= number)
        assert len(stream.tokens) >= number, f"ended after {len(stream.tokens)}: {stream.finish_reason}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition, which is checked after every message, holds."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert not self.dead, self.dead
                if self.wrong is not None:
                    raise self.wrong
                self._changed.clear()
                await self._changed.wait()

    async def run(self, engine: VllmEngine, prompt: list[int], params: SamplingParams) -> Stream:
        """Run a request to its end without disturbance and return its stream."""
        stream = self.stream(prompt, params)
        self.submit(engine, stream)
        await self.until(lambda: stream.finished)
        return stream
