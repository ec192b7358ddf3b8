"""Runs the plan on an engine, within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.profiling.plan import Batch, batches, prompt_lengths
from worker_agent.profiling.probes import Lived, Probes

# Prompts of each length; the first steps of an engine, which nobody measures.
_REPEATS: Final = 3
_WARM_UP: Final = Batch(4, 64, 32, rounds=1)
# Of the time, for the TTFT curve; what it leaves is the batches'.
_CURVE_SHARE: Final = 0.4
# Steps with one batch size that a median is taken of.
_LEAST_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Median of the pure decode steps of one run with one batch size."""

    seconds: float
    requests: int
    kv_tokens: float


@dataclass(slots=True)
class Samples:
    """What was measured; times in seconds."""

    # (prompt tokens, TTFT), each the median of some.
    ttft: list[tuple[int, float]] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    lived: list[Lived] = field(default_factory=list)
    # Of each of those medians: the mean of the same times over it.
    ttft_stalls: list[float] = field(default_factory=list)
    decode_stalls: list[float] = field(default_factory=list)


async def measure(
    engine: Engine, info: EngineInfo, probes: Probes, budget_s: float, tell: Callable[[str], None]
) -> Samples:
    """As much of the plan as there is time for. `tell` gets what is being done. Raises ProbeFailed."""
    samples = Samples()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout_at(began_s + budget_s):
            tell("warming up")
            await _run(engine, probes, _fitted(_WARM_UP, info))
            await _curve(engine, info, probes, samples, began_s + _CURVE_SHARE * budget_s, tell)
            for batch in batches(info):
                tell(f"{batch.requests} requests of {batch.prompt_tokens} tokens")
                try:
                    await _run(engine, probes, batch)
                finally:
                    # Of a run that was cut short, too: each sample stands for itself.
                    _keep(probes, samples)
    except TimeoutError:
        tell(f"{budget_s:g} s are over; what is left of the plan is left out")
    finally:
        probes.drop(engine)
    return samples


async def _curve(
    engine: Engine,
    info: EngineInfo,
    probes: Probes,
    samples: Samples,
    until_s: float,
    tell: Callable[[str], None],
) -> None:
    """TTFT of one prompt alone, by length."""
    loop = asyncio.get_running_loop()
    for tokens in prompt_lengths(info):
        began_s = loop.time()
        tell(f"a prompt of {tokens} tokens")
        seen = probes.begin()
        for number in range(_REPEATS):
            probes.submit(engine, tokens, 1)
            await probes.ended(number + 1)
        times = [lived.ttft_s for lived in seen.lived]
        samples.ttft.append((tokens, median(times)))
        samples.ttft_stalls.append(fmean(times) / median(times))
        # The next one takes twice as long, at least.
        if loop.time() + 2 * (loop.time() - began_s) > until_s:
            return


async def _run(engine: Engine, probes: Probes, batch: Batch) -> None:
    """Keep the batch in flight until all its requests have ended (CascadeInfer, section 4.1)."""
    seen = probes.begin()
    left = batch.requests * batch.rounds
    while left or len(probes):
        while left and len(probes) < batch.requests:
            probes.submit(engine, batch.prompt_tokens, batch.output_tokens)
            left -= 1
        await probes.ended(len(seen.lived) + 1)


def _keep(probes: Probes, samples: Samples) -> None:
    seen = probes.seen
    samples.lived += seen.lived
    for requests in {step.requests for step in seen.steps}:
        alike = [step for step in seen.steps if step.requests == requests]
        if len(alike) >= _LEAST_STEPS:
            seconds, kv_tokens = median(s.seconds for s in alike), median(s.kv_tokens for s in alike)
            samples.decode.append(DecodeSample(seconds, requests, kv_tokens))
            samples.decode_stalls.append(fmean(s.seconds for s in alike) / seconds)


def _fitted(batch: Batch, info: EngineInfo) -> Batch:
    """As much of a batch as a small engine takes."""
    prompt = min(batch.prompt_tokens, max(1, info.max_model_len // 2 - 1))
    return Batch(
        min(batch.requests, info.max_num_seqs),
        prompt,
        min(batch.output_tokens, info.max_model_len - prompt - 1),
        batch.rounds,
    )
