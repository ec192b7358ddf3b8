"""One architecture in one of vLLM's ways to run, in a process of its own: prints `RESULT {json}`.

    python -m benchmarks.models.cell MODEL_FOLDER [--v2] [--async-scheduling] [--random-weights] ...

The streams, half greedy, half seeded, run once undisturbed and once more while each is moved at two random
points; a prompt is of random tokens. In one process, so that no second engine is needed: a request leaves the
engine and comes back into other blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.models.architectures import VOCABULARY
from benchmarks.models.triton_on_cpu import use_model_runner_v2

if TYPE_CHECKING:
    from benchmarks.models.sink import Sink, Stream
    from worker_agent.engine.vllm.engine import VllmEngine

PREFIX: Final = "RESULT "
MOVES: Final = 2
_SEED: Final = 11


@dataclass(frozen=True, slots=True)
class Way:
    """How vLLM is to run, and for how much."""

    model: str
    v2: bool
    async_scheduling: bool
    dtype: str
    random_weights: bool
    prefix_caching: bool
    streams: int
    tokens: int


@dataclass(slots=True)
class Result:
    """`live` and `replayed`: moves; `equal`: streams of which every token is the undisturbed one.

    reason: why no move is live; empty: they are. error: what kept it from being measured at all.
    """

    streams: int = 0
    equal: int = 0
    live: int = 0
    replayed: int = 0
    fewest_moves: int = 0
    reason: str = ""
    error: str = ""
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--v2", action="store_true")
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--random-weights", action="store_true", help="the model has no tokenizer")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=70)
    given = parser.parse_args()
    way = Way(
        model=given.model,
        v2=given.v2,
        async_scheduling=given.async_scheduling,
        dtype=given.dtype,
        random_weights=given.random_weights,
        prefix_caching=not given.no_prefix_caching,
        streams=given.streams,
        tokens=given.tokens,
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Compiled helpers ask a Triton backend for more than its name.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if way.v2:
        use_model_runner_v2()
    begun = time.monotonic()
    result = asyncio.run(_measured(way))
    result.seconds = round(time.monotonic() - begun, 1)
    print(PREFIX + json.dumps(asdict(result)), flush=True)
    # The interpreter would take seconds more to take vLLM's modules apart.
    sys.stdout.flush()
    os._exit(0)


async def _measured(way: Way) -> Result:
    from benchmarks.models.sink import Sink
    from worker_agent.engine.vllm.engine import VllmEngine
    from worker_agent.engine.vllm.settings import VllmSettings

    engine = VllmEngine(
        VllmSettings(
            model=way.model,
            dtype=way.dtype,
            max_num_seqs=way.streams + 4,
            max_model_len=512,
            kv_bytes=256 << 20,
            cpu_threads=1,
            host_kv_bytes=0,
            async_scheduling=way.async_scheduling or None,
            engine_args={
                "skip_tokenizer_init": way.random_weights,
                "enable_prefix_caching": way.prefix_caching,
            },
        )
    )
    sink = Sink()
    try:
        await engine.start(sink)
    except RuntimeError as error:
        return Result(error=str(error))
    ran_v2 = await engine._ask(lambda parts: bool(parts.core.config.use_v2_model_runner))
    ran_async = await engine._ask(lambda parts: parts.core.core.batch_queue is not None)
    if (ran_v2, ran_async) != (way.v2, way.async_scheduling):
        return Result(error=f"it ran with v2={ran_v2}, async={ran_async}")
    try:
        result = await _compared(engine, sink, way)
    except (RuntimeError, TimeoutError) as error:
        result = Result(error=f"{type(error).__name__}: {error}")
    await engine.stop()
    return result


async def _compared(engine: VllmEngine, sink: Sink, way: Way) -> Result:
    undisturbed = _submitted(engine, sink, way)
    await sink.until(lambda: all(stream.finished for stream in undisturbed))
    handover = await engine._ask(lambda parts: parts.core.handover)
    result = Result(streams=way.streams, reason=handover.reason)
    moved = _submitted(engine, sink, way)
    chance = random.Random(_SEED)
    points = [sorted(chance.sample(range(2, way.tokens - 12), MOVES)) for _ in moved]
    counts = await asyncio.gather(
        *(_moved(engine, sink, stream, at, result) for stream, at in zip(moved, points, strict=True))
    )
    await sink.until(lambda: all(stream.finished for stream in moved))
    result.fewest_moves = min(counts)
    result.equal = sum(
        one.tokens == other.tokens and len(one.tokens) == way.tokens and not other.failed
        for one, other in zip(undisturbed, moved, strict=True)
    )
    return result


async def _moved(engine: VllmEngine, sink: Sink, stream: Stream, points: list[int], result: Result) -> int:
    from benchmarks.models.moves import move_by_replay, move_live

    count = 0
    for point in points:
        await sink.until(lambda: stream.finished or len(stream.tokens) >= point)  # noqa: B023
        if result.reason and await move_by_replay(engine, sink, stream):
            result.replayed += 1
            count += 1
        elif not result.reason and await move_live(engine, stream):
            result.live += 1
            count += 1
    return count


def _submitted(engine: VllmEngine, sink: Sink, way: Way) -> list[Stream]:
    from vllm.sampling_params import SamplingParams

    chance = random.Random(_SEED)
    streams = []
    for number in range(way.streams):
        prompt = [
            chance.randrange(3, VOCABULARY if way.random_weights else 256)
            for _ in range(chance.randrange(8, 120))
        ]
        changes = {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
        params = SamplingParams(max_tokens=way.tokens, ignore_eos=True, **changes)
        streams.append(sink.submit(engine, prompt, params))
    return streams


if __name__ == "__main__":
    main()
