"""Extension points of a cluster spec."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.request import SimRequest


class LengthPenalty(Protocol):
    """Slowdown of a decode step by the spread of lengths in its batch (CascadeInfer, figure 2)."""

    def attention_factor(self, lengths: NDArray[np.int64]) -> float:
        """Return the factor on the time per KV token; 1.0: none. `lengths`: context tokens, one entry per
        request."""
        ...

    def step_factor(self, lengths: NDArray[np.int64]) -> float:
        """Return the factor on the whole decode part of the step (base included); 1.0: none."""
        ...


class LengthPredictor(Protocol):
    """A worker's prediction of a request's remaining output (ARES, section 4)."""

    def remaining(self, request: SimRequest, output_tokens: int) -> float | None:
        """Return the predicted output tokens after the first `output_tokens`, or None for no prediction.

        Must be a pure function of its arguments, so that runs can be repeated.
        """
        ...
