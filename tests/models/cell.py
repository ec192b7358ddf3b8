"""Measure one architecture in one of vLLM's run configurations.

The streams, half greedy, half seeded, run once undisturbed and once while each is migrated at two random
points; prompts are random tokens. Rounding makes a sampled token depend on the rest of the batch, so a stream
with other tokens is run twice more with the engine to itself: undisturbed, and migrated. An engine with one
device needs no second one: a request leaves it and returns into other blocks. With several ranks there are
two engines, and a request goes to the other and back, from rank to rank.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.models.architectures import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.moves import EngineEndpoint
    from tests.models.sink import Sink, Stream
    from worker_agent.engine.vllm.engine import VllmEngine

MOVES: Final = 2
_SEED: Final = 11
# Each with fewer concurrent streams.
_MAX_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class RunConfig:
    """vLLM's run configuration, and the number and length of streams."""

    model: str
    v2: bool
    async_scheduling: bool
    tensor: int
    stages: int
    dtype: str
    random_weights: bool
    prefix_caching: bool
    attention: str
    streams: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `seed` None: greedy."""

    prompt: list[int]
    seed: int | None
    tokens: int


@dataclass(slots=True)
class Result:
    """Results of a cell. `live` and `replayed`: migrations; `equal`: streams whose tokens all equal the
    undisturbed ones; `alone`: other streams that are equal with the engine to themselves.

    reason: why no migration is live; empty if they are. error: why nothing was measured.
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


def measure(config: RunConfig) -> Result:
    """Measure a cell, in a process that has imported all of `warm.py` and exits afterwards."""
    started_s = time.monotonic()
    if config.tensor * config.stages > 1:
        from tests.models.forked_ranks import forked_ranks

        ranks: AbstractContextManager[None] = forked_ranks(config.tensor, config.stages)
    else:
        ranks = nullcontext()
    with ranks:
        result = asyncio.run(_measure(config))
    result.seconds = round(time.monotonic() - started_s, 1)
    return result


async def _measure(config: RunConfig) -> Result:
    from tests.models.moves import connect_engines
    from tests.models.sink import Sink

    sink = Sink()
    engines = [_engine(config) for _ in range(1 if config.tensor * config.stages == 1 else 2)]
    try:
        infos = [await engine.start(sink) for engine in engines]
        ran_v2 = await engines[0]._run(lambda parts: bool(parts.core.config.use_v2_model_runner))
        ran_async = await engines[0]._run(lambda parts: bool(parts.core.core.async_scheduling))
        if (ran_v2, ran_async) != (config.v2, config.async_scheduling):
            return Result(error=f"vLLM ran with v2={ran_v2}, async={ran_async}")
        endpoints = await connect_engines(engines, infos)
        result = await _compare_streams(endpoints, sink, config, infos[0].handover.reason)
    except (RuntimeError, TimeoutError) as error:
        result = Result(error=f"{type(error).__name__}: {error}")
    for engine in engines:
        await engine.stop()
    return result


def _engine(config: RunConfig) -> VllmEngine:
    from worker_agent.engine.vllm.engine import VllmEngine
    from worker_agent.settings import EngineOptions

    return VllmEngine(
        EngineOptions(
            model=config.model,
            host_kv_bytes=0,
            arguments={
                "dtype": config.dtype,
                "max_num_seqs": config.streams + 4,
                "max_model_len": 512,
                "kv_cache_memory_bytes": 256 << 20,
                "async_scheduling": config.async_scheduling or None,
                "tensor_parallel_size": config.tensor,
                "pipeline_parallel_size": config.stages,
                "skip_tokenizer_init": config.random_weights,
                "enable_prefix_caching": config.prefix_caching,
                "attention_backend": config.attention or None,
            },
        )
    )


async def _compare_streams(
    endpoints: Sequence[EngineEndpoint], sink: Sink, config: RunConfig, reason: str
) -> Result:
    engine = endpoints[0].engine
    undisturbed = [_submit(engine, sink, request) for request in _requests(config)]
    await sink.wait_until(lambda: all(stream.finished for stream in undisturbed))
    result = Result(streams=config.streams, reason=reason)
    rng = random.Random(_SEED)
    # In the first half: engines with several ranks continue while a request is migrated between ranks.
    points = [sorted(rng.sample(range(2, config.tokens // 2), MOVES)) for _ in undisturbed]
    moved = await _run_moved(endpoints, sink, config, points, result)
    for request, one, other, at in zip(_requests(config), undisturbed, moved, points, strict=True):
        if _is_same(one, other, config):
            result.equal += 1
        elif await _is_same_alone(endpoints, sink, request, at, config, reason):
            result.alone += 1
    return result


async def _run_moved(
    endpoints: Sequence[EngineEndpoint],
    sink: Sink,
    config: RunConfig,
    points: Sequence[list[int]],
    result: Result,
) -> list[Stream]:
    """Run every stream with migrations, again if it ended before all of them, as on a busy machine."""
    requests = _requests(config)
    moved: dict[int, Stream] = {}
    counts = dict.fromkeys(range(config.streams), 0)
    for _ in range(_MAX_ROUNDS):
        remaining = [number for number, count in counts.items() if count < MOVES]
        for number in remaining:
            moved[number] = _submit(endpoints[0].engine, sink, requests[number])
        counted = await asyncio.gather(
            *(
                _move_stream(endpoints, sink, moved[number], points[number], result.reason)
                for number in remaining
            )
        )
        await sink.wait_until(lambda: all(stream.finished for stream in moved.values()))
        counts |= dict(zip(remaining, counted, strict=True))
    result.fewest_moves = min(counts.values())
    if result.reason:
        result.replayed = sum(counts.values())
    else:
        result.live = sum(counts.values())
    return [moved[number] for number in range(config.streams)]


def _is_same(undisturbed: Stream, moved: Stream, config: RunConfig) -> bool:
    complete = len(undisturbed.tokens) == config.tokens
    return undisturbed.tokens == moved.tokens and complete and not moved.failed


async def _is_same_alone(
    endpoints: Sequence[EngineEndpoint],
    sink: Sink,
    request: Request,
    points: list[int],
    config: RunConfig,
    reason: str,
) -> bool:
    """Return whether the stream, with the engine to itself, is the same when it is migrated."""
    undisturbed = _submit(endpoints[0].engine, sink, request)
    await sink.wait_until(lambda: undisturbed.finished)
    # Again if it ended before all migrations, as in `_run_moved`.
    for _ in range(_MAX_ROUNDS):
        moved = _submit(endpoints[0].engine, sink, request)
        moves = await _move_stream(endpoints, sink, moved, points, reason)
        await sink.wait_until(lambda: moved.finished)  # noqa: B023
        if moves == MOVES:
            return _is_same(undisturbed, moved, config)
    return False


async def _move_stream(
    endpoints: Sequence[EngineEndpoint], sink: Sink, stream: Stream, points: list[int], reason: str
) -> int:
    """Migrate a stream at each point, to each endpoint in turn; return the number of migrations."""
    from tests.models.moves import move_by_replay, move_live

    count = 0
    for point in points:
        await sink.wait_until(lambda: stream.finished or len(stream.tokens) >= point)  # noqa: B023
        source, target = endpoints[count % len(endpoints)], endpoints[(count + 1) % len(endpoints)]
        if reason:
            count += await move_by_replay(source, target, sink, stream)
        else:
            count += await move_live(source, target, stream)
    return count


def _requests(config: RunConfig) -> list[Request]:
    rng = random.Random(_SEED)
    return [
        Request(
            [
                rng.randrange(3, VOCABULARY if config.random_weights else 256)
                for _ in range(rng.randrange(8, 120))
            ],
            None if number % 2 == 0 else number,
            config.tokens,
        )
        for number in range(config.streams)
    ]


def _submit(engine: VllmEngine, sink: Sink, request: Request) -> Stream:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=request.tokens,
        ignore_eos=True,
        temperature=0.0 if request.seed is None else 0.8,
        seed=request.seed,
    )
    return sink.submit(engine, request.prompt, params)
