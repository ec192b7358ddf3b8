"""Problems with long reasoning and short answers: MATH-500, GPQA and LiveCodeBench in equal shares.

For PASCAL's figures 14 and 16 (HPCA'26, section V-D). Published is only that "the number of reasoning
tokens can reach as much as 8.48x" that of answering tokens; taken here as the ratio of the means of
LiveCodeBench, the one with the longest reasoning. All else is an assumption, in the order that the three
are known for: prompts of about 75, 200 and 500 tokens; reasoning of mean 1,100, 2,600 and 5,100 tokens;
answers of mean 350, 430 and 601.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.blend import blend
from simulator.workloads.lengths import Lengths, lognormal_of_mean, tokens

NAME = "math_gpqa_lcb"
MOST_REASONING_TOKENS = 32_768


def _problems(
    prompt_mean: float, reasoning_mean: float, answer_mean: float, count: int, rng: np.random.Generator
) -> Lengths:
    """Lognormal lengths with these means; sigma 0.6 for prompts and answers, 0.8 for reasoning."""
    prompt = lognormal_of_mean(prompt_mean, 0.6, count, rng)
    reasoning = lognormal_of_mean(reasoning_mean, 0.8, count, rng)
    answer = lognormal_of_mean(answer_mean, 0.6, count, rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MOST_REASONING_TOKENS)), tokens(answer))


math_500 = partial(_problems, 75.0, 1_100.0, 350.0)
gpqa = partial(_problems, 200.0, 2_600.0, 430.0)
live_code_bench = partial(_problems, 500.0, 5_100.0, 5_100.0 / 8.48)


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    return blend([(1 / 3, math_500), (1 / 3, gpqa), (1 / 3, live_code_bench)], count, rng)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
