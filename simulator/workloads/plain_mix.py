"""Summaries of long texts, chat and long writing, a third each, without reasoning.

A load whose bottleneck is KV: long prompts next to long outputs, so that the KV of a batch grows while it
decodes. The kinds are ours, not a measurement. Their lognormal lengths were chosen so that all requests
together have the statistics of a load on which orders inside an instance were found to differ most: prompts
of mean 2,000 and P95 5,000; outputs of mean 780, P50 470, P95 2,060, P99 2,540.

Arrivals are bursty: the time between them is gamma distributed with a coefficient of variation of 2.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import gamma_requests
from simulator.workloads.lengths import Lengths, blend, lognormal_of_mean, tokens

NAME = "plain_mix"
ARRIVAL_CV = 2.0


def summaries(count: int, rng: np.random.Generator) -> Lengths:
    """Draw long prompts of similar length and short outputs."""
    return _plain(count, rng, prompt=(4_400, 0.13), output=(207, 0.5))


def chat(count: int, rng: np.random.Generator) -> Lengths:
    """Draw prompts with some history and outputs of usual length."""
    return _plain(count, rng, prompt=(1_000, 0.7), output=(490, 0.4))


def writing(count: int, rng: np.random.Generator) -> Lengths:
    """Draw long outputs."""
    return _plain(count, rng, prompt=(600, 0.7), output=(1_643, 0.248))


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    return blend([(1 / 3, summaries), (1 / 3, chat), (1 / 3, writing)], count, rng)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return gamma_requests(NAME, lengths, count, rate_per_s, seed, ARRIVAL_CV)


def _plain(
    count: int, rng: np.random.Generator, *, prompt: tuple[float, float], output: tuple[float, float]
) -> Lengths:
    """Draw lognormal prompts and outputs, given as (mean, sigma of the logarithm)."""
    prompts = tokens(lognormal_of_mean(*prompt, count, rng))
    return Lengths(prompts, np.zeros(count, np.int64), tokens(lognormal_of_mean(*output, count, rng)))
