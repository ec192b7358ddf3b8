"""Arena-Hard prompts to a reasoning model, as far as PASCAL says what they were (HPCA'26, section V).

Derived like `alpaca_eval`, from:

- reasoning: lognormal. More than 70% of requests below 1,000 tokens (figure 10): 71% taken. P99 of KV
  transfers 0.25 s (section V-C), 11,920 tokens on an empty link: four fifths of it, 9,500 tokens, taken for
  P99. Both together: median 496.
- answer: lognormal of mean 668, what Arena-Hard's leaderboard of 2024-07-31 gives for gpt-4o-mini; the
  other chat models there have 480 to 720. Its spread (sigma 0.6) is an assumption.
- prompt: lognormal of mean 100: 500 questions in 283,456 characters, of which about 165 each are not the
  question, at 4 characters a token; its spread is an assumption.

The three are drawn independently, which is an assumption too. Reasoning ends at 32,768 tokens,
DeepSeek-R1's limit.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, lognormal, lognormal_of_mean, tokens

NAME = "arena_hard"
MOST_REASONING_TOKENS = 32_768


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    prompt = lognormal(median=50, p99=777, count=count, rng=rng)
    reasoning = lognormal(median=496, p99=9_500, count=count, rng=rng)
    answer = lognormal_of_mean(668, sigma=0.6, count=count, rng=rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MOST_REASONING_TOKENS)), tokens(answer))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
