"""Half Arena-Hard, half problems with long reasoning: PASCAL's figure 16 (HPCA'26, section V-D)."""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads import arena_hard, math_gpqa_lcb
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.blend import blend
from simulator.workloads.lengths import Lengths

NAME = "arena_hard_mixed"


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests."""
    return blend([(0.5, arena_hard.lengths), (0.5, math_gpqa_lcb.lengths)], count, rng)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """`count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
