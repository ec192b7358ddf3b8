"""A virtual clock, a front end and small settings for tests of the simulated engine."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from tailrace.output_flags import OutputFlag
from tailrace.wire.outputs import read_outputs
from worker_agent.engine.base import Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated import SimulatedEngine, SimulatedFaults, SimulatedSettings

EOS = 258
THINK = 259
END_THINK = 260

SMALL = SimulatedSettings(
    kv_blocks=24,
    block_tokens=4,
    kv_bytes_per_token=16,
    num_layers=2,
    max_model_len=72,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    reasoning_mean_tokens=6,
    answer_mean_tokens=8,
)

T = TypeVar("T")


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, although it may yield to the event loop; return its result."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class _Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualClock:
    """Clock whose time passes only in `advance`."""

    def __init__(self) -> None:
        self._now = 100.0
        self._order = itertools.count()
        self._pending: list[tuple[float, int, _Timer, Callable[[], object]]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer()
        heapq.heappush(self._pending, (when, next(self._order), timer, callback))
        return timer

    def advance(self, calls: int = 1) -> bool:
        """Advance to the next scheduled calls and make them. Return False if none was left."""
        for _ in range(calls):
            while self._pending and self._pending[0][2].cancelled:
                heapq.heappop(self._pending)
            if not self._pending:
                return False
            when, _, _, callback = heapq.heappop(self._pending)
            self._now = max(self._now, when)
            callback()
        return True

    def drain(self, most: int = 100_000) -> None:
        """Advance until nothing is pending."""
        for _ in range(most):
            if not self.advance():
                return
        raise AssertionError("the engines never come to rest")


def at_boundary(clock: VirtualClock, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for the end of the current step, advancing the clock; return its result."""

    async def both() -> T:
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        while not task.done():
            assert clock.advance(), "the current step never ends"
            await asyncio.sleep(0)
        return await task

    return asyncio.run(both())


class Stream:
    """A front end's state of one request."""

    def __init__(self, request_id: str, handle: int, frames: Frames, owner: int) -> None:
        self.request_id = request_id
        self.handle = handle
        self.frames = frames
        self.owner = owner
        self.epoch = 0
        self.tokens: list[int] = []
        self.flags: list[int] = []
        self.finish: tuple[int, int | str | None] | None = None
        self.failed = False
        # Why it was not run.
        self.refusal: EngineRefusal | None = None

    @property
    def live(self) -> bool:
        return self.finish is None and not self.failed


class FrontEnd:
    """Accepts outputs as a real front end does and checks that each message matches its columns."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.rejected = 0
        self.utilities: list[tuple[int, int, Frames]] = []
        self.dead: list[str] = []

    def sink(self, instance: int) -> InstanceSink:
        return InstanceSink(self, instance)

    def accept(self, instance: int, columns: StepColumns) -> None:
        outputs = read_outputs(columns.frames).outputs
        lengths = {
            len(outputs),
            len(columns.handles),
            len(columns.epochs),
            len(columns.first_indices),
            len(columns.counts),
            len(columns.flags),
        }
        assert len(lengths) == 1
        assert columns.token_ids == [token for output in outputs for token in output.new_token_ids]
        for output, handle, epoch, first, count, flags in zip(
            outputs,
            columns.handles,
            columns.epochs,
            columns.first_indices,
            columns.counts,
            columns.flags,
            strict=True,
        ):
            assert count == len(output.new_token_ids)
            ended = bool(flags & (OutputFlag.FINISHED | OutputFlag.FAILED))
            assert ended == (output.finish_reason is not None)
            stream = self.streams.get(handle)
            if stream is None or not stream.live or stream.owner != instance or stream.epoch != epoch:
                self.rejected += 1
                continue
            assert output.request_id == stream.request_id
            assert first == len(stream.tokens), "an output is lost or repeated"
            stream.tokens += output.new_token_ids
            stream.flags.append(flags)
            if flags & OutputFlag.FAILED:
                stream.failed = True
                stream.refusal = columns.refusal
            elif output.finish_reason is not None:
                stream.finish = (output.finish_reason, output.stop_reason)


class InstanceSink:
    """The engine sink of one instance."""

    def __init__(self, front_end: FrontEnd, instance: int) -> None:
        self._front_end = front_end
        self._instance = instance

    def on_step(self, columns: StepColumns) -> None:
        self._front_end.accept(self._instance, columns)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        self._front_end.utilities.append((client, call_id, frames))

    def on_engine_dead(self, reason: str) -> None:
        self._front_end.dead.append(reason)


class Fleet:
    """Engines on one virtual clock and one front end over them."""

    def __init__(self, *settings: SimulatedSettings) -> None:
        self.clock = VirtualClock()
        self.front_end = FrontEnd()
        self.faults = [SimulatedFaults() for _ in settings]
        self.engines = [
            SimulatedEngine(each, faults=faults, clock=self.clock)
            for each, faults in zip(settings, self.faults, strict=True)
        ]
        self.infos = [
            now(engine.start(self.front_end.sink(number))) for number, engine in enumerate(self.engines)
        ]
        self._handles = itertools.count(1)

    def submit(self, instance: int, prompt: list[int], **sampling: object) -> Stream:
        handle = next(self._handles)
        request_id = f"chatcmpl-{handle}"
        stream = Stream(request_id, handle, request_frames(request_id, prompt, **sampling), instance)
        self.front_end.streams[handle] = stream
        self.resubmit(stream)
        return stream

    def resubmit(self, stream: Stream, sampling_state: bytes = b"") -> None:
        """Submit a stream's request to its owner, to go on after the tokens accepted so far."""
        self.engines[stream.owner].submit(
            Submission(
                self.key(stream),
                stream.request_id,
                stream.epoch,
                stream.frames,
                list(stream.tokens),
                frontend_id="front-end",
                sampling_state=sampling_state,
            )
        )

    @staticmethod
    def key(stream: Stream) -> RequestKey:
        return RequestKey(0, stream.handle)


def request_frames(request_id: str, prompt: list[int], **sampling: object) -> list[bytes]:
    """Return vLLM's message of a request, with the EOS token that vLLM's API server fills in."""
    params = {"temperature": 0.0, "_eos_token_id": EOS, **sampling}
    return [msgspec.msgpack.encode([request_id, prompt, None, params, None, 12.5, None, None, None])]


def undisturbed(prompt: list[int], **sampling: object) -> Stream:
    """Run the request alone on an engine with enough room and return its stream."""
    fleet = Fleet(msgspec.structs.replace(SMALL, kv_blocks=1000))
    stream = fleet.submit(0, prompt, **sampling)
    fleet.clock.drain()
    assert not stream.live
    return stream
