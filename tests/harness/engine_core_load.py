"""An open-loop load generator in place of vLLM's API server: sends vLLM's own messages, records token times.

HTTP, templates and tokenization are left out: on two cores they would dominate the results. Everything else
is the real front end, which treats this as its API server (`tailrace serve frontend --front none`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq
import zmq.asyncio

from simulator.request import SimRequest
from tailrace.service.tasks import cancel
from tailrace.wire.outputs import NIL, FinishReason, read_outputs
from tailrace.wire.ready import ENGINE_IDENTITY
from tailrace.wire.requests import EngineCoreRequest, RequestType, SamplingParams
from tests.waiting import WAIT_S
from worker_agent.engine.simulated.script import read_vocabulary
from worker_agent.engine.simulated.settings import SimulatedSettings

# The token ID that ends an answer; the simulated engine ends by length and only outputs it.
_END_TOKEN: Final = 0


@dataclass(slots=True)
class Stream:
    """Result of one request. Times in seconds from the start of the replay; None: not yet."""

    request: SimRequest
    # When it was sent: on a busy machine, later than its arrival.
    sent_s: float = 0.0
    tokens: int = 0
    first_token_s: float | None = None
    first_answer_s: float | None = None
    finish_s: float | None = None
    # Longest time between two answering tokens.
    gap_max_s: float = 0.0
    last_s: float = 0.0
    finish_reason: int | None = None
    # Outputs that arrived after the last token.
    outputs_after_end: int = 0

    @property
    def complete(self) -> bool:
        """Whether every token of the trace's lengths arrived, exactly once, and the engine ended the
        stream."""
        return (
            self.tokens == self.request.output_tokens
            and self.finish_reason == FinishReason.STOP
            and not self.outputs_after_end
        )

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first answering token."""
        return None if self.first_answer_s is None else self.first_answer_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between answering tokens; 0.0 for an answer of one, as in the simulator."""
        if self.finish_s is None or self.first_answer_s is None:
            return None
        gaps = self.request.answer_tokens - 1
        return (self.finish_s - self.first_answer_s) / gaps if gaps else 0.0

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finish_s is None else self.finish_s - self.request.arrival_s


class LoadGenerator:
    """Acts as the API server on the engine core's sockets in `folder`."""

    def __init__(self, folder: Path, max_tokens: int, reasons: bool) -> None:
        """`max_tokens`: of every request. `reasons`: whether the model reasons."""
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._input.bind(f"ipc://{folder / 'in'}")
        self._output = self._context.socket(zmq.PULL)
        # If this process is late, outputs queue here and not at the front end.
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._output.bind(f"ipc://{folder / 'out'}")
        self._encoder = msgspec.msgpack.Encoder()
        self._max_tokens = max_tokens
        settings = SimulatedSettings()
        vocabulary = read_vocabulary(settings.tokenizer, settings.think, settings.end_think)
        self._letters = vocabulary.letters
        # The end of a prompt with an open thought, and of one with a closed thought.
        self._thinking = [vocabulary.think] if reasons and vocabulary.think is not None else []
        self._not_thinking = [vocabulary.end_think] if reasons and vocabulary.end_think is not None else []
        self._streams: dict[str, Stream] = {}
        self._remaining = 0
        self._start_s = 0.0
        self._done = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    async def ready(self) -> None:
        """Wait until the front end has workers. Raise TimeoutError if it has none in time."""
        async with asyncio.timeout(WAIT_S):
            identity, _ = await self._input.recv_multipart()
        if identity != ENGINE_IDENTITY:
            raise RuntimeError(f"unexpected identity of an engine core: {identity!r}")

    async def replay(
        self,
        prefix: str,
        requests: Sequence[SimRequest],
        patience_s: float,
        on_progress: Callable[[int], None],
    ) -> list[Stream]:
        """Send each request at its arrival time, and wait until all have ended, at most `patience_s` after
        the last.

        `prefix` makes IDs unique across replays. `on_progress` gets the number of requests that have ended.
        """
        # Built in advance: a long prompt takes milliseconds.
        messages = [self._message(f"{prefix}{request.request_id}", request) for request in requests]
        self._streams = {f"{prefix}{request.request_id}": Stream(request) for request in requests}
        self._remaining = len(requests)
        self._done.clear()
        self._start_s = time.monotonic()
        reader = asyncio.create_task(self._read_outputs(on_progress), name="outputs")
        try:
            for message, (request_id, stream) in zip(messages, self._streams.items(), strict=True):
                wait_s = self._start_s + stream.request.arrival_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                stream.sent_s = time.monotonic() - self._start_s
                await self._input.send_multipart(
                    [ENGINE_IDENTITY, RequestType.ADD.value, message(request_id)]
                )
            async with asyncio.timeout(patience_s):
                await self._done.wait()
        except TimeoutError:
            # Requests that have not ended count as lost.
            pass
        finally:
            await cancel(reader)
        return list(self._streams.values())

    def _message(self, request_id: str, request: SimRequest) -> Callable[[str], bytes]:
        # The last token of the thought is its closing tag, the last of the answer the end token.
        lengths = {"answer_tokens": request.answer_tokens - 1}
        if request.reasoning_tokens:
            lengths["reasoning_tokens"] = request.reasoning_tokens - 1
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            eos_token_id=_END_TOKEN,
            extra_args=msgspec.Raw(msgspec.msgpack.encode(lengths)),
        )
        letters = self._letters
        tail = self._thinking if request.reasoning_tokens else self._not_thinking
        # Prompts differ from the first token on, so that none share a prefix.
        head = [letters[byte] for byte in request_id.encode()]
        body = request.prompt_tokens - len(tail)
        prompt = (head + [letters[0]] * max(0, body - len(head)))[:body] + tail

        def encode(request_id: str) -> bytes:
            return self._encoder.encode(
                EngineCoreRequest(request_id, prompt, NIL, sampling, NIL, time.time(), NIL, None, None)
            )

        return encode

    async def _read_outputs(self, on_progress: Callable[[int], None]) -> None:
        while self._remaining:
            frames = await self._output.recv_multipart()
            now_s = time.monotonic() - self._start_s
            for output in read_outputs(frames).outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue
                if stream.finish_s is not None:
                    stream.outputs_after_end += 1
                    continue
                self._record_tokens(stream, len(output.new_token_ids), now_s)
                if output.finish_reason is not None:
                    stream.finish_s = now_s
                    stream.finish_reason = output.finish_reason
                    self._remaining -= 1
                    on_progress(len(self._streams) - self._remaining)
        self._done.set()

    @staticmethod
    def _record_tokens(stream: Stream, tokens: int, now_s: float) -> None:
        if not tokens:
            return
        stream.tokens += tokens
        if stream.first_token_s is None:
            stream.first_token_s = now_s
        if stream.first_answer_s is not None:
            stream.gap_max_s = max(stream.gap_max_s, now_s - stream.last_s)
        elif stream.tokens > stream.request.reasoning_tokens:
            stream.first_answer_s = now_s
        stream.last_s = now_s
