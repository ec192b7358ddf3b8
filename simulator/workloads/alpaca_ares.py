"""Alpaca prompts answered by DeepSeek-R1-Distill-Qwen-7B, as ARES describes them (table 2).

| | mean | sd | P50 | P90 | P95 |
|---|---|---|---|---|---|
| prompt | 11 | 4 | 10 | 15 | 18 |
| output | 8596 | 13354 | 987 | 32690 | 32691 |

The quantiles above are ARES's. The others are not published: they are chosen so that the means and
deviations come out as published, which leaves little choice: nearly a quarter of the outputs must run to
the 32K limit. Prompt and output are drawn independently; all of the output counts as answer, as in
`sharegpt_ares`.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, QuantileTable, tokens

NAME = "alpaca_ares"

PROMPT = QuantileTable(
    shares=(0.0, 0.5, 0.9, 0.95, 0.99, 1.0),
    values=(6, 10, 15, 18, 24, 45),
)
OUTPUT = QuantileTable(
    shares=(0.0, 0.5, 0.76, 0.77, 0.9, 0.95, 1.0),
    values=(64, 987, 6404, 32600, 32690, 32691, 32700),
)


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    prompt, output = PROMPT.sample(count, rng), OUTPUT.sample(count, rng)
    return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(output))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
