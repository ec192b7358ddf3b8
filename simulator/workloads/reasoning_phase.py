"""The reasoning phase alone: PASCAL's characterisation on one GPU (HPCA'26, section III-A, figure 4).

Prompts of 128 tokens; reasoning "randomly selected between 128 and 2048 tokens". The figure shows single
lengths, so they are taken from the multiples of 128, each as likely. The answer, which the figure leaves
out, is one token. The paper runs 300 requests; their rate is not given.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths

NAME = "reasoning_phase"


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    reasoning = 128 * rng.integers(1, 17, size=count)
    return Lengths(np.full(count, 128), reasoning, np.ones(count, np.int64))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
