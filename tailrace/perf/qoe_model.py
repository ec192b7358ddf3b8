"""The QoE model (CascadeInfer, section 4.1): what a batch costs its requests.

Q is a latency: lower is better. It is fitted as normalized latency, seconds per output token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.profiles import Profile

Floats = NDArray[np.float64]

# F_0 .. F_4 of Eq. (1).
FEATURES: Final = 5


def features(inputs: Sequence[int] | Floats, lengths: Sequence[int] | Floats) -> Floats:
    """F_0 .. F_4 of a batch: 1, n, sum I, sum I^2, sum L.

    `inputs`: prompt tokens I of each request; `lengths`: its present length L, prompt included. Shape [5].
    """
    prompt = np.asarray(inputs, dtype=np.float64)
    length = np.asarray(lengths, dtype=np.float64)
    return np.array([1.0, len(prompt), prompt.sum(), prompt @ prompt, length.sum()])


@dataclass(frozen=True, slots=True)
class QoeModel:
    """D_0 .. D_4 of Eq. (1), in seconds per output token and unit of the feature."""

    d: tuple[float, float, float, float, float]

    def request(self, batch: Floats) -> float:
        """Q of one request in a batch with these features: sum of D_k F_k. `batch`: shape [5] or [n, 5]."""
        return float(np.asarray(batch, dtype=np.float64) @ np.array(self.d))

    def requests(self, batches: Floats) -> Floats:
        """Q of one request in each batch; `batches` has shape [n, 5], the result [n]."""
        return np.asarray(batches @ np.array(self.d), dtype=np.float64)

    def batch(self, batch: Floats) -> float:
        """Q^B of Eq. (1): n requests, each at the same Q."""
        return float(batch[1]) * self.request(batch)

    @staticmethod
    def fit(batches: Floats, latencies: Floats) -> QoeModel:
        """The least squares of section 4.1, to the letter: no weights, no constraint on signs.

        `batches`: [n, 5] features a request saw, averaged over its life; `latencies`: [n] its normalized
        latency in seconds per token. Columns are scaled to one norm before solving, for they differ by eight
        orders of magnitude; that changes no exact solution. Raises ValueError if shapes do not agree or
        nothing is given.
        """
        if batches.ndim != 2 or batches.shape[1] != FEATURES or latencies.shape != batches.shape[:1]:
            raise ValueError(f"features of shape {batches.shape} do not go with {latencies.shape} latencies")
        if not len(batches):
            raise ValueError("a fit needs samples")
        scale = np.linalg.norm(batches, axis=0)
        scale[scale == 0.0] = 1.0
        solved = np.linalg.lstsq(batches / scale, latencies, rcond=None)[0] / scale
        d0, d1, d2, d3, d4 = (float(value) for value in solved)
        return QoeModel((d0, d1, d2, d3, d4))

    @staticmethod
    def of_profile(profile: Profile, alpha: float = 1 / 256, beta: float = 1.0) -> QoeModel:
        """The model that follows from a profile's step times, where no samples are at hand.

        `alpha` and `beta` weigh prefill and iteration time (section 4.1; the paper names neither). Q is
        seconds per output token, so an iteration counts once, and a prefill, which is waited for once a
        request, is spread over its output: 256 tokens, near the mean of ShareGPT's answers.
        """
        prefill, decode = profile.prefill, profile.decode
        return QoeModel(
            (
                beta * decode.base_ms / 1e3,
                (alpha * prefill.base_ms + beta * decode.ms_per_request) / 1e3,
                alpha * prefill.ms_per_token / 1e3,
                alpha * prefill.ms_per_token_squared / 1e3,
                beta * decode.ms_per_kv_token / 1e3,
            )
        )

    @staticmethod
    def mean(models: Sequence[QoeModel]) -> QoeModel:
        """The model whose every Q is the mean of theirs. Raises ZeroDivisionError without any."""
        d0, d1, d2, d3, d4 = (
            sum(values) / len(models) for values in zip(*(m.d for m in models), strict=True)
        )
        return QoeModel((d0, d1, d2, d3, d4))


def relative_errors(predicted: Floats, measured: Floats) -> Floats:
    """(predicted - measured) / measured, one a request (section 6.5, Figure 13)."""
    return np.asarray((predicted - measured) / measured, dtype=np.float64)


def mean_relative_error(predicted: Floats, measured: Floats) -> float:
    """The paper's 8.9%; with the global mean as prediction, its 64%."""
    return float(np.abs(relative_errors(predicted, measured)).mean())
