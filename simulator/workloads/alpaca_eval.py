"""AlpacaEval 2.0 prompts to a reasoning model, as far as PASCAL says what they were (HPCA'26, section V).

PASCAL's lengths are those of o4-mini's answers and were not released; its figure 8 shows them without
numbers. What is known or taken here:

- reasoning: lognormal. More than 70% of requests below 1,000 tokens (figure 10): 75% taken. The 99th
  percentile of KV transfers took 0.14 s (section V-C), which at 100 Gbit/s and 262,144 bytes a token is
  6,676 tokens if nothing else is on the link: four fifths of it, 5,300 tokens, taken for P99. Both
  together: median 506.
- answer: lognormal of mean 455: AlpacaEval's leaderboard gives 2,049 characters on average for its
  reference model (gpt4_1106_preview), at 4.5 characters a token. Its spread (sigma 0.6) is an assumption.
- prompt: lognormal of mean 42: 136,100 bytes in 805 instructions, at 4 bytes a token; its spread is an
  assumption.

The three are drawn independently, which is an assumption too. Reasoning ends at 32,768 tokens,
DeepSeek-R1's limit.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, lognormal, lognormal_of_mean, tokens

NAME = "alpaca_eval"
MOST_REASONING_TOKENS = 32_768


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    prompt = lognormal(median=27, p99=240, count=count, rng=rng)
    reasoning = lognormal(median=506, p99=5_300, count=count, rng=rng)
    answer = lognormal_of_mean(455, sigma=0.6, count=count, rng=rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MOST_REASONING_TOKENS)), tokens(answer))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
