"""Code completion, and mixes of several kinds of requests."""

from __future__ import annotations

import numpy as np

from simulator.workloads import r1, sharegpt
from simulator.workloads.lengths import (
    Lengths,
    QuantileLengths,
    QuantileTable,
    blend,
    lognormal_of_mean,
    tokens,
)

_SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
CODE = QuantileLengths(
    prompt=QuantileTable(
        _SHARES,
        (3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3193, 5194, 7315, 7436, 7436, 7437, 7437),
    ),
    output=QuantileTable(
        _SHARES,
        (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 172, 252, 831, 1899),
    ),
)
"""Code completion: long prompts, short outputs, after the Azure LLM inference trace 2023 (code).

Source: AzureLLMInferenceTrace_code.csv of https://github.com/Azure/AzurePublicDataset, CC-BY-4.0, described
in P. Patel et al., "Splitwise" (ISCA 2024): 8,819 requests; prompts of mean 2,048 tokens, outputs of mean 28.
These are quantiles of its two columns. They are drawn independently (their correlation in the trace is
0.001), and arrivals are Poisson: for the trace's bursts use the trace itself (`azure:PATH`).
"""


def mix(count: int, rng: np.random.Generator) -> Lengths:
    """A third of the requests each: chat (`sharegpt.any_turns`), code completion and reasoning (`r1`).

    The shares are ours, not a measurement: each kind has a different bottleneck (long histories, prefill,
    long decodes), so a policy made for one of them is tested on the others. The kind of each request is drawn
    independently.
    """
    return blend([(1 / 3, sharegpt.any_turns), (1 / 3, CODE), (1 / 3, r1.lengths)], count, rng)


PLAIN_MIX_ARRIVAL_CV = 2.0


def plain_mix(count: int, rng: np.random.Generator) -> Lengths:
    """Summaries of long texts, chat and long writing, a third each, without reasoning.

    A load whose bottleneck is KV: long prompts next to long outputs, so that the KV of a batch grows while it
    decodes. The kinds are ours, not a measurement. Their lognormal lengths were chosen so that all requests
    together have the statistics of a load on which orders inside an instance were found to differ most:
    prompts of mean 2,000 and P95 5,000; outputs of mean 780, P50 470, P95 2,060, P99 2,540.

    Arrivals are bursty: the time between them is gamma distributed with a coefficient of variation of 2.
    """
    return blend([(1 / 3, _summaries), (1 / 3, _chat), (1 / 3, _writing)], count, rng)


def _summaries(count: int, rng: np.random.Generator) -> Lengths:
    """Draw long prompts of similar length and short outputs."""
    return _plain(count, rng, prompt=(4_400, 0.13), output=(207, 0.5))


def _chat(count: int, rng: np.random.Generator) -> Lengths:
    """Draw prompts with some history and outputs of usual length."""
    return _plain(count, rng, prompt=(1_000, 0.7), output=(490, 0.4))


def _writing(count: int, rng: np.random.Generator) -> Lengths:
    """Draw long outputs."""
    return _plain(count, rng, prompt=(600, 0.7), output=(1_643, 0.248))


def _plain(
    count: int, rng: np.random.Generator, *, prompt: tuple[float, float], output: tuple[float, float]
) -> Lengths:
    """Draw lognormal prompts and outputs, given as (mean, sigma of the logarithm)."""
    prompts = tokens(lognormal_of_mean(*prompt, count, rng))
    return Lengths(prompts, np.zeros(count, np.int64), tokens(lognormal_of_mean(*output, count, rng)))
