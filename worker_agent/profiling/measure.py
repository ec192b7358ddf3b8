"""Run the measurement plan on an engine within a time budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.profiling.probes import ProbeResult, Probes

# Share of the KV cache that probes use; the rest is for other contents and partly filled blocks.
_KV_SHARE: Final = 0.8
_SHORTEST: Final = 16
# Pure decode steps per batch, enough for a meaningful median.
_DECODE_STEPS: Final = 24
# CascadeInfer profiles batch sizes 1, 2, 4, ... and doubling lengths (section 4.1); here every second one.
_FACTOR: Final = 4
_LONGEST_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """`requests` concurrent requests of these lengths, in `rounds` rounds."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int = 2

    @property
    def tokens(self) -> int:
        """Return the tokens that the concurrent requests hold at their end."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


def prompt_lengths(info: EngineInfo) -> list[int]:
    """Return the prompt lengths for the TTFT curve: 16, 32, ... and the longest that fits."""
    longest = min(info.max_model_len - 2, kv_room(info))
    lengths = list(_spread(_SHORTEST, longest, 2))
    if not lengths or lengths[-1] < longest:
        lengths.append(longest)
    return lengths


def batches(info: EngineInfo) -> list[Batch]:
    """Return the batches of all sizes and lengths that fit, by their total tokens."""
    planned: list[Batch] = []
    for requests in _spread(1, min(info.max_num_seqs, _LONGEST_BATCH), _FACTOR):
        for prompt in _spread(2 * _SHORTEST, info.max_model_len, _FACTOR):
            # The prompts of a batch take several steps, during which the first ones already decode.
            mixed = -(-requests * prompt // info.step_tokens)
            batch = Batch(requests, prompt, _DECODE_STEPS + 2 * mixed)
            if prompt + batch.output_tokens <= info.max_model_len and batch.tokens <= kv_room(info):
                planned.append(batch)
    return sorted(planned, key=lambda batch: batch.tokens)


def kv_room(info: EngineInfo) -> int:
    """Return the tokens of KV that probes may use."""
    return int(_KV_SHARE * info.kv_blocks_total * info.kv_shape.block_tokens)


def _spread(first: int, longest: int, factor: int) -> Iterator[int]:
    while first <= longest:
        yield first
        first *= factor


# Prompts per length.
_REPEATS: Final = 3
# An unmeasured batch for the engine's first steps.
_WARM_UP: Final = Batch(4, 64, 32, rounds=1)
# Share of the budget for the TTFT curve; the rest is for the batches.
_CURVE_SHARE: Final = 0.4
# Minimum number of steps with one batch size for a median.
_LEAST_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """The median of the pure decode steps of one run with one batch size."""

    seconds: float
    requests: int
    kv_tokens: float


@dataclass(slots=True)
class Samples:
    """The measurements; times in seconds."""

    # (prompt tokens, TTFT), each the median of _REPEATS prompts.
    ttft: list[tuple[int, float]] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    results: list[ProbeResult] = field(default_factory=list)
    # For each of these medians: the ratio of the mean of the same times to it.
    ttft_stalls: list[float] = field(default_factory=list)
    decode_stalls: list[float] = field(default_factory=list)


async def measure(
    engine: Engine, info: EngineInfo, probes: Probes, budget_s: float, report: Callable[[str], None]
) -> Samples:
    """Measure what the budget allows of the plan. `report` gets progress messages. Raise ProbeFailed."""
    samples = Samples()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout_at(began_s + budget_s):
            report("warming up")
            await _run(engine, probes, _fitted(_WARM_UP, info))
            await _curve(engine, info, probes, samples, began_s + _CURVE_SHARE * budget_s, report)
            for batch in batches(info):
                report(f"{batch.requests} requests of {batch.prompt_tokens} tokens")
                try:
                    await _run(engine, probes, batch)
                finally:
                    # Samples are independent, so those of an interrupted run are valid too.
                    _keep(probes, samples)
    except TimeoutError:
        held = max((sample.kv_tokens for sample in samples.decode), default=0.0)
        report(
            f"the budget of {budget_s:g} s is used up; the rest of the plan is skipped: steps were measured "
            f"with up to {held:,.0f} of {kv_room(info):,} tokens of KV, and are extrapolated from there"
        )
    finally:
        probes.drop(engine)
    return samples


async def _curve(
    engine: Engine,
    info: EngineInfo,
    probes: Probes,
    samples: Samples,
    until_s: float,
    report: Callable[[str], None],
) -> None:
    """Measure the TTFT of single prompts by length."""
    loop = asyncio.get_running_loop()
    for tokens in prompt_lengths(info):
        began_s = loop.time()
        report(f"a prompt of {tokens} tokens")
        observed = probes.begin()
        for number in range(_REPEATS):
            probes.submit(engine, tokens, 1)
            await probes.ended(number + 1)
        times = [result.ttft_s for result in observed.results]
        samples.ttft.append((tokens, median(times)))
        samples.ttft_stalls.append(fmean(times) / median(times))
        # The next length takes at least twice as long.
        if loop.time() + 2 * (loop.time() - began_s) > until_s:
            return


async def _run(engine: Engine, probes: Probes, batch: Batch) -> None:
    """Keep the batch in flight until all its requests have ended (CascadeInfer, section 4.1)."""
    observed = probes.begin()
    remaining = batch.requests * batch.rounds
    while remaining or len(probes):
        while remaining and len(probes) < batch.requests:
            probes.submit(engine, batch.prompt_tokens, batch.output_tokens)
            remaining -= 1
        await probes.ended(len(observed.results) + 1)


def _keep(probes: Probes, samples: Samples) -> None:
    observed = probes.observed
    samples.results += observed.results
    for requests in {step.requests for step in observed.steps}:
        alike = [step for step in observed.steps if step.requests == requests]
        if len(alike) >= _LEAST_STEPS:
            seconds, kv_tokens = median(s.seconds for s in alike), median(s.kv_tokens for s in alike)
            samples.decode.append(DecodeSample(seconds, requests, kv_tokens))
            samples.decode_stalls.append(fmean(s.seconds for s in alike) / seconds)


def _fitted(batch: Batch, info: EngineInfo) -> Batch:
    """Reduce a batch to the limits of a small engine."""
    prompt = min(batch.prompt_tokens, max(1, info.max_model_len // 2 - 1))
    return Batch(
        min(batch.requests, info.max_num_seqs),
        prompt,
        min(batch.output_tokens, info.max_model_len - prompt - 1),
        batch.rounds,
    )
