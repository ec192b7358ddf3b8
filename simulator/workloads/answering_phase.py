"""The answering phase alone: PASCAL's characterisation on one GPU (HPCA'26, section III-A, figure 5).

Prompt and reasoning together are 128 tokens, and their KV exists when the experiment begins; answers are of
128 to 2048 tokens, taken from the multiples of 128 as in `reasoning_phase`. Here the 128 tokens are a
prompt that is still to be prefilled, some milliseconds of work. The paper runs 300 requests; their rate is
not given.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths

NAME = "answering_phase"


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    answer = 128 * rng.integers(1, 17, size=count)
    return Lengths(np.full(count, 128), np.zeros(count, np.int64), answer)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
