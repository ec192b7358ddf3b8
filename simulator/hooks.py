"""What a cluster's description can plug into the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.request import SimRequest


class LengthPenalty(Protocol):
    """Slow-down of a decode step by how much the lengths in its batch differ (CascadeInfer, figure 2)."""

    def attention_factor(self, lengths: NDArray[np.int64]) -> float:
        """Factor on the time per KV token; 1.0: none. `lengths`: context tokens, one entry a request."""
        ...

    def step_factor(self, lengths: NDArray[np.int64]) -> float:
        """Factor on the whole decode part of the step (base included); 1.0: none."""
        ...


class LengthPredictor(Protocol):
    """What a worker would predict of a request's remaining output (ARES, section 4)."""

    def remaining(self, request: SimRequest, output_tokens: int) -> float | None:
        """Predicted output tokens still to come after `output_tokens` of them; None: no prediction.

        Must be a pure function of its arguments, so that a run can be repeated.
        """
        ...


class FutureLoad(Protocol):
    """A worker's own simulation of its coming load (ARES, section 5.2)."""

    def of_each(
        self, tokens: Sequence[int], remaining: Sequence[float], counts: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Token loads of several instances at the coming steps.

        `tokens`, `remaining`: context and expected remaining tokens of each request, one instance after the
        other; `counts`: requests of each instance.
        """
        ...
