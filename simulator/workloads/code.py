"""Code completion: long prompts, short outputs, after the Azure LLM inference trace 2023 (code).

Source: AzureLLMInferenceTrace_code.csv of https://github.com/Azure/AzurePublicDataset, CC-BY-4.0, described
in P. Patel et al., "Splitwise" (ISCA 2024): 8,819 requests; prompts of mean 2,048 tokens, outputs of mean 28.
This module contains quantiles of its two columns. They are drawn independently (their correlation in the
trace is 0.001), and arrivals are Poisson: for the trace's bursts use the trace itself (`azure:PATH`).
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, QuantileTable, tokens

NAME = "code"

_SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
PROMPT = QuantileTable(
    _SHARES,
    (3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3193, 5194, 7315, 7436, 7436, 7437, 7437),
)
OUTPUT = QuantileTable(
    _SHARES,
    (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 172, 252, 831, 1899),
)


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    prompt, output = PROMPT.sample(count, rng), OUTPUT.sample(count, rng)
    return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(output))


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
