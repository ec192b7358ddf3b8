"""Variability of a workload's load: tokens per minute, their variation and correlation (Arrow, section
3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.base import WorkloadError
from simulator.workloads.lengths import Tokens


@dataclass(frozen=True, slots=True)
class LoadPerMinute:
    """Tokens of the requests of each minute from the first arrival, without minutes that have no requests.

    Leaving those out reproduces Arrow's figures: the Azure code trace has minutes without requests.
    """

    prompt_tokens: Tokens
    output_tokens: Tokens

    def prompt_variation(self) -> float:
        """Return the coefficient of variation of the prompt tokens per minute: standard deviation over
        mean."""
        return float(self.prompt_tokens.std() / self.prompt_tokens.mean())

    def correlation(self) -> float | None:
        """Return Pearson's correlation of prompt and output tokens per minute; None if either is constant."""
        if not self.prompt_tokens.std() or not self.output_tokens.std():
            return None
        return float(np.corrcoef(self.prompt_tokens, self.output_tokens)[0, 1])


def load_per_minute(requests: Sequence[SimRequest]) -> LoadPerMinute:
    """Compute the load per minute. Raise WorkloadError if there are no requests."""
    if not requests:
        raise WorkloadError("no requests, no load")
    start_s = requests[0].arrival_s
    minutes = np.array([int((request.arrival_s - start_s) // 60.0) for request in requests])
    prompts = np.bincount(minutes, [request.prompt_tokens for request in requests]).astype(np.int64)
    outputs = np.bincount(minutes, [request.output_tokens for request in requests]).astype(np.int64)
    busy = prompts > 0
    return LoadPerMinute(prompts[busy], outputs[busy])
