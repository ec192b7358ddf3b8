"""A mix of chat, code completion and reasoning.

A third of the requests each: `sharegpt_turns`, `code` and `r1`.

The shares are ours, not a measurement: each kind has a different bottleneck (long histories, prefill, long
decodes), so a policy made for one of them is tested on the others. The kind of each request is drawn
independently.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads import code, r1, sharegpt_turns
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, blend

NAME = "mix"


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    return blend([(1 / 3, sharegpt_turns.lengths), (1 / 3, code.lengths), (1 / 3, r1.lengths)], count, rng)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
