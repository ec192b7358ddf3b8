"""The QoE model (CascadeInfer, section 4.1): the latency of requests as a function of their batch.

Q is a normalized latency in seconds per output token: lower is better.
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
    """Return F_0 .. F_4 of a batch: 1, n, sum I, sum I^2, sum L; shape [5].

    `inputs`: prompt tokens I of each request; `lengths`: its current length L, including the prompt.
    """
    prompt = np.asarray(inputs, dtype=np.float64)
    length = np.asarray(lengths, dtype=np.float64)
    return np.array([1.0, len(prompt), prompt.sum(), prompt @ prompt, length.sum()])


@dataclass(frozen=True, slots=True)
class QoeModel:
    """D_0 .. D_4 of Eq. (1), in seconds per output token and unit of the feature."""

    d: tuple[float, float, float, float, float]

    def request(self, batch: Floats) -> float:
        """Return Q of a request in a batch with these features: the sum of D_k F_k. `batch`: shape [5]."""
        return float(np.asarray(batch, dtype=np.float64) @ np.array(self.d))

    def requests(self, batches: Floats) -> Floats:
        """Return Q of a request in each batch; `batches` has shape [n, 5], the result [n]."""
        return np.asarray(batches @ np.array(self.d), dtype=np.float64)

    def batch(self, batch: Floats) -> float:
        """Return Q^B of Eq. (1): Q summed over the batch's n requests."""
        return float(batch[1]) * self.request(batch)

    @staticmethod
    def fit(batches: Floats, latencies: Floats) -> QoeModel:
        """Fit the model by least squares exactly as in section 4.1: no weights, no constraint on signs.

        `batches`: [n, 5] features of the batches of a request, averaged over its life; `latencies`: [n] its
        normalized latency in seconds per token. Columns differ by eight orders of magnitude, so they are
        scaled to norm one before solving, which does not change an exact solution. Raise ValueError for
        mismatching shapes or without samples.
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
    def of_profile(profile: Profile) -> QoeModel:
        """Derive the model from a profile's step times, for use without samples.

        Prefill and iteration time have weights (section 4.1, which names no values). Q is in seconds per
        output token, so an iteration counts once, and a prefill, which occurs once per request, is spread
        over its output: 256 tokens, near the mean of ShareGPT's answers.
        """
        prefill, decode, alpha = profile.prefill, profile.decode, 1 / 256
        return QoeModel(
            (
                decode.base_ms / 1e3,
                (alpha * prefill.base_ms + decode.ms_per_request) / 1e3,
                alpha * prefill.ms_per_token / 1e3,
                alpha * prefill.ms_per_token_squared / 1e3,
                decode.ms_per_kv_token / 1e3,
            )
        )

    @staticmethod
    def mean(models: Sequence[QoeModel]) -> QoeModel:
        """Return the model whose Q is the mean of the models' Q. Raise ZeroDivisionError without models."""
        d0, d1, d2, d3, d4 = (
            sum(values) / len(models) for values in zip(*(m.d for m in models), strict=True)
        )
        return QoeModel((d0, d1, d2, d3, d4))


def relative_errors(predicted: Floats, measured: Floats) -> Floats:
    """Return (predicted - measured) / measured for each request (section 6.5, Figure 13)."""
    return np.asarray((predicted - measured) / measured, dtype=np.float64)


def mean_relative_error(predicted: Floats, measured: Floats) -> float:
    """Return the mean absolute relative error: 8.9% in the paper, and 64% with the global mean as
    prediction."""
    return float(np.abs(relative_errors(predicted, measured)).mean())
