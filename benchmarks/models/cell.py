"""One architecture in one of vLLM's ways to run.

The streams, half greedy, half seeded, run once undisturbed and once more while each is moved at two random
points; a prompt is of random tokens. What a stream samples can depend on who shares its batches (rounding),
so one that came out otherwise is run twice more with the engine to itself: undisturbed, and moved. An engine
with one device needs no second one: a request leaves it and comes back into other blocks. Of engines with
several ranks there are two, and a request goes to the other and back, from rank to rank.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.models.architectures import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.models.moves import Place
    from benchmarks.models.sink import Sink, Stream
    from worker_agent.engine.vllm.engine import VllmEngine

MOVES: Final = 2
_SEED: Final = 11
# Each with fewer streams at once.
_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class Way:
    """How vLLM is to run, and for how much."""

    model: str
    v2: bool
    async_scheduling: bool
    tensor: int
    stages: int
    dtype: str
    random_weights: bool
    prefix_caching: bool
    streams: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """`seed` None: greedy."""

    prompt: list[int]
    seed: int | None
    tokens: int


@dataclass(slots=True)
class Result:
    """`live` and `replayed`: moves; `equal`: streams of which every token is the undisturbed one; `alone`:
    others of which that holds when each has the engine to itself.

    reason: why no move is live; empty: they are. error: what kept it from being measured at all.
    """

    streams: int = 0
    equal: int = 0
    alone: int = 0
    live: int = 0
    replayed: int = 0
    fewest_moves: int = 0
    reason: str = ""
    error: str = ""
    seconds: float = 0.0


def measure(way: Way) -> Result:
    """In a process that has imported all of `warm.py`, and will end then."""
    begun = time.monotonic()
    if way.tensor * way.stages > 1:
        from benchmarks.models.forked_ranks import forked_ranks

        ranks: AbstractContextManager[None] = forked_ranks(way.tensor, way.stages)
    else:
        ranks = nullcontext()
    with ranks:
        result = asyncio.run(_measured(way))
    result.seconds = round(time.monotonic() - begun, 1)
    return result


async def _measured(way: Way) -> Result:
    from benchmarks.models.moves import places_of
    from benchmarks.models.sink import Sink

    sink = Sink()
    engines = [_engine(way) for _ in range(1 if way.tensor * way.stages == 1 else 2)]
    try:
        infos = [await engine.start(sink) for engine in engines]
        ran_v2 = await engines[0]._ask(lambda parts: bool(parts.core.config.use_v2_model_runner))
        ran_async = await engines[0]._ask(lambda parts: bool(parts.core.core.async_scheduling))
        if (ran_v2, ran_async) != (way.v2, way.async_scheduling):
            return Result(error=f"it ran with v2={ran_v2}, async={ran_async}")
        places = await places_of(engines, infos)
        result = await _compared(places, sink, way, infos[0].handover.reason)
    except (RuntimeError, TimeoutError) as error:
        result = Result(error=f"{type(error).__name__}: {error}")
    for engine in engines:
        await engine.stop()
    return result


def _engine(way: Way) -> VllmEngine:
    from worker_agent.engine.vllm.engine import VllmEngine
    from worker_agent.engine.vllm.settings import VllmSettings

    return VllmEngine(
        VllmSettings(
            model=way.model,
            dtype=way.dtype,
            max_num_seqs=way.streams + 4,
            max_model_len=512,
            kv_bytes=256 << 20,
            cpu_threads=1,
            host_kv_bytes=0,
            async_scheduling=way.async_scheduling or None,
            tensor_parallel_size=way.tensor,
            pipeline_parallel_size=way.stages,
            engine_args={
                "skip_tokenizer_init": way.random_weights,
                "enable_prefix_caching": way.prefix_caching,
            },
        )
    )


async def _compared(places: Sequence[Place], sink: Sink, way: Way, reason: str) -> Result:
    engine = places[0].engine
    undisturbed = [_submit(engine, sink, asked) for asked in _requests(way)]
    await sink.until(lambda: all(stream.finished for stream in undisturbed))
    result = Result(streams=way.streams, reason=reason)
    chance = random.Random(_SEED)
    # In the first half: engines with several ranks go on while a move is on its way from rank to rank.
    points = [sorted(chance.sample(range(2, way.tokens // 2), MOVES)) for _ in undisturbed]
    moved = await _all_moved(places, sink, way, points, result)
    for asked, one, other, at in zip(_requests(way), undisturbed, moved, points, strict=True):
        if _same(one, other, way):
            result.equal += 1
        elif await _same_alone(places, sink, asked, at, way, reason):
            result.alone += 1
    return result


async def _all_moved(
    places: Sequence[Place], sink: Sink, way: Way, points: Sequence[list[int]], result: Result
) -> list[Stream]:
    """Every stream, moved. One that ended before all its moves, on a busy machine, is run again."""
    requests = _requests(way)
    moved: dict[int, Stream] = {}
    counts = dict.fromkeys(range(way.streams), 0)
    for _ in range(_ROUNDS):
        left = [number for number, count in counts.items() if count < MOVES]
        for number in left:
            moved[number] = _submit(places[0].engine, sink, requests[number])
        counted = await asyncio.gather(
            *(_moved(places, sink, moved[number], points[number], result.reason) for number in left)
        )
        await sink.until(lambda: all(stream.finished for stream in moved.values()))
        counts |= dict(zip(left, counted, strict=True))
    result.fewest_moves = min(counts.values())
    if result.reason:
        result.replayed = sum(counts.values())
    else:
        result.live = sum(counts.values())
    return [moved[number] for number in range(way.streams)]


def _same(undisturbed: Stream, moved: Stream, way: Way) -> bool:
    whole = len(undisturbed.tokens) == way.tokens
    return undisturbed.tokens == moved.tokens and whole and not moved.failed


async def _same_alone(
    places: Sequence[Place], sink: Sink, asked: Request, points: list[int], way: Way, reason: str
) -> bool:
    """Whether the stream, with the engine to itself, is the same when it is moved."""
    undisturbed = _submit(places[0].engine, sink, asked)
    await sink.until(lambda: undisturbed.finished)
    moved = _submit(places[0].engine, sink, asked)
    moves = await _moved(places, sink, moved, points, reason)
    await sink.until(lambda: moved.finished)
    return _same(undisturbed, moved, way) and moves == MOVES


async def _moved(places: Sequence[Place], sink: Sink, stream: Stream, points: list[int], reason: str) -> int:
    """From place to place in turn."""
    from benchmarks.models.moves import move_by_replay, move_live

    count = 0
    for point in points:
        await sink.until(lambda: stream.finished or len(stream.tokens) >= point)  # noqa: B023
        source, target = places[count % len(places)], places[(count + 1) % len(places)]
        if reason:
            count += await move_by_replay(source, target, sink, stream)
        else:
            count += await move_live(source, target, stream)
    return count


def _requests(way: Way) -> list[Request]:
    chance = random.Random(_SEED)
    return [
        Request(
            [
                chance.randrange(3, VOCABULARY if way.random_weights else 256)
                for _ in range(chance.randrange(8, 120))
            ],
            None if number % 2 == 0 else number,
            way.tokens,
        )
        for number in range(way.streams)
    ]


def _submit(engine: VllmEngine, sink: Sink, asked: Request) -> Stream:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=asked.tokens,
        ignore_eos=True,
        temperature=0.0 if asked.seed is None else 0.8,
        seed=asked.seed,
    )
    return sink.submit(engine, asked.prompt, params)
