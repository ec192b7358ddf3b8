"""ShareGPT, first turns: a user's opening message and the answer of a model that does not reason.

- prompt: the quantiles of ARES's table 2 (mean 305, P50 36, P90 920, P95 1609), see `sharegpt_ares`.
- answer: mean 338 tokens, as vLLM's paper gives it (Kwon et al., SOSP'23, section 6.1); lognormal with a
  standard deviation equal to the mean, which is an assumption.

Drawn independently. For conversations with their history, see `sharegpt_turns`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.request import SimRequest
from simulator.workloads import sharegpt_ares
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, lognormal_of_mean, tokens

NAME = "sharegpt"

ANSWER_MEAN = 338.0
# Sigma of the logarithm; the square root of ln 2 makes the standard deviation equal to the mean.
ANSWER_SIGMA = 0.8326


def messages(count: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw the lengths of `count` user messages and of their answers."""
    return sharegpt_ares.PROMPT.sample(count, rng), lognormal_of_mean(ANSWER_MEAN, ANSWER_SIGMA, count, rng)


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    prompt, answer = messages(count, rng)
    return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(answer))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
