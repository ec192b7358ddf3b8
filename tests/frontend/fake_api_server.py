"""vLLM's API server as its engine core sees it: a ROUTER and a PULL socket."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from tailrace.wire.outputs import EngineCoreOutput, read_outputs
from tailrace.wire.ready import ENGINE_IDENTITY, ReadyResponse, read_ready
from tailrace.wire.requests import EngineCoreRequest, RequestType, SamplingParams
from tests.waiting import WAIT_S

NIL = msgspec.Raw(b"\xc0")


class FakeApiServer:
    """Collects the outputs of each request in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._input.bind(f"ipc://{folder / 'in'}")
        self._output = self._context.socket(zmq.PULL)
        self._output.bind(f"ipc://{folder / 'out'}")
        self._encoder = msgspec.msgpack.Encoder()
        self._calls = 0
        # Deadline of every wait, in seconds.
        self.wait_s = WAIT_S
        self._reader: asyncio.Task[None] | None = None
        self._arrived = asyncio.Condition()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, EngineCoreOutput] = {}
        self.utilities: dict[int, bytes] = {}

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    async def ready(self) -> ReadyResponse:
        """Wait for the engine core's first message and return it."""
        async with asyncio.timeout(WAIT_S):
            identity, payload = await self._input.recv_multipart()
        assert identity == ENGINE_IDENTITY
        return read_ready(payload)

    async def add(
        self,
        request_id: str,
        prompt: list[int] | None = None,
        max_tokens: int = 100,
        extra_args: Mapping[str, object] | None = None,
        adapter: tuple[str, int, str] | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        prompt_logprobs: int | None = None,
        chosen: str | None = None,
        session_id: str | None = None,
    ) -> None:
        """Add a request. `adapter`: name, number, path; `chosen`: the id that its client sees."""
        sampling = self.sampling(max_tokens, extra_args)
        sampling.prompt_logprobs = prompt_logprobs
        lora = msgspec.Raw(msgspec.msgpack.encode(adapter))
        request = EngineCoreRequest(
            request_id,
            prompt or [1, 2, 3],
            NIL,
            sampling,
            NIL,
            0.0,
            lora,
            None,
            None,
            client_index=0,
            priority=priority,
            trace_headers=dict(trace_headers or {}) or None,
            external_req_id=chosen,
            session_id=session_id,
        )
        await self._send(RequestType.ADD, request)

    @staticmethod
    def sampling(max_tokens: int, extra_args: Mapping[str, object] | None) -> SamplingParams:
        """Return sampling parameters with this output limit, in tokens."""
        raw = msgspec.Raw(msgspec.msgpack.encode(extra_args))
        return SamplingParams(max_tokens=max_tokens, extra_args=raw)

    async def abort(self, *request_ids: str) -> None:
        """Abort requests, as when their clients disconnect."""
        await self._send(RequestType.ABORT, list(request_ids))

    async def call(self, method: str) -> bytes:
        """Make a utility call and return its raw reply."""
        self._calls += 1
        call_id = self._calls
        await self._send(RequestType.UTILITY, (0, call_id, method, ()))
        await self.until(lambda: call_id in self.utilities)
        return self.utilities[call_id]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for outputs to make the condition true. Raise TimeoutError after `wait_s` seconds."""
        async with asyncio.timeout(self.wait_s), self._arrived:
            await self._arrived.wait_for(condition)

    async def tokens_of(self, request_id: str, count: int) -> list[int]:
        """Wait until the request has `count` tokens and return all that it has."""
        await self.until(lambda: len(self.tokens[request_id]) >= count)
        return self.tokens[request_id]

    async def end_of(self, request_id: str) -> EngineCoreOutput:
        """Wait for the request's last output and return it."""
        await self.until(lambda: request_id in self.ends)
        return self.ends[request_id]

    async def _send(self, kind: RequestType, body: object) -> None:
        await self._input.send_multipart([ENGINE_IDENTITY, kind.value, self._encoder.encode(body)])

    async def _read(self) -> None:
        while True:
            frames = await self._output.recv_multipart()
            message = read_outputs(frames)
            async with self._arrived:
                if message.utility_output != NIL:
                    answer = msgspec.msgpack.decode(message.utility_output)
                    self.utilities[answer[0]] = frames[0]
                for output in message.outputs:
                    assert output.request_id not in self.ends, "output after the end"
                    self.tokens[output.request_id].extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output
                self._arrived.notify_all()
