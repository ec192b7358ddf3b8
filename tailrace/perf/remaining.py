"""How many output tokens requests have left: at most, as predicted, and on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tailrace.cluster import RequestView

SAMPLE: Final = 64
"""Sample size for estimates over many requests."""


def tokens_left(prompt_tokens: int, output_tokens: int, max_tokens: int, max_model_len: int = 0) -> float:
    """Return the largest number of output tokens that may still come, at least 0; infinite without a known
    limit.

    A request ends at its `max_tokens`, or when its context reaches `max_model_len` (0: unknown). A predictor
    is trained on how long answers would be without these limits (predictor/samples.py); the smaller value
    applies.
    """
    left = math.inf if max_tokens <= 0 else float(max_tokens - output_tokens)
    if max_model_len > 0:
        left = min(left, float(max_model_len - prompt_tokens - output_tokens))
    return max(0.0, left)


def limited(predicted: float | None, left: float) -> float | None:
    """Return a prediction capped by what may still come. None: there is no prediction."""
    return None if predicted is None else max(0.0, min(predicted, left))


def expected_remaining(request: RequestView) -> float:
    """Return the predicted remaining tokens; without a prediction the maximum, infinite if unbounded."""
    predicted = request.predicted_remaining_tokens
    if predicted is not None:
        return predicted
    return tokens_left(request.prompt_tokens, request.output_tokens, request.max_tokens)


def mean_remaining_tokens(requests: Sequence[RequestView]) -> float:
    """Return the mean remaining output tokens of `requests`, which must not be empty.

    A request without a prediction is expected to generate as many more tokens as it has so far. That holds
    on average in a steady state for any distribution of lengths, since the age and the residual life of a
    renewal process have the same distribution.
    """
    predicted = ((r.predicted_remaining_tokens, r.output_tokens) for r in requests)
    return sum(made if remaining is None else remaining for remaining, made in predicted) / len(requests)
