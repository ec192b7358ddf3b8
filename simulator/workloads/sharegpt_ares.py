"""ShareGPT prompts answered by DeepSeek-R1-Distill-Qwen-7B, as ARES describes them (section 2 and table 2).

| | mean | sd | P50 | P90 | P95 | other |
|---|---|---|---|---|---|---|
| prompt | 305 | 1053 | 36 | 920 | 1609 | |
| output | 7542 | 12008 | 1536 | 32670 | 32679 | 29.2% below 1,000; 17.3% above 30,000; at most 32K |

The quantiles above are ARES's. The others (first, last, P70, the prompts' P99) are not published: they are
chosen so that the means and deviations come out as published. Prompt and output are drawn independently.
ARES does not say how much of the output is reasoning, and its scheduler does not ask: all of it counts as
answer.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, QuantileTable, tokens

NAME = "sharegpt_ares"

PROMPT = QuantileTable(
    shares=(0.0, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0),
    values=(4, 36, 90, 920, 1609, 1960, 21500),
)
OUTPUT = QuantileTable(
    shares=(0.0, 0.292, 0.5, 0.7, 0.827, 0.9, 0.95, 1.0),
    values=(64, 1000, 1536, 1876, 30000, 32670, 32679, 32700),
)


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    prompt, output = PROMPT.sample(count, rng), OUTPUT.sample(count, rng)
    return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(output))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
