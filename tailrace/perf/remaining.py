"""Estimate the mean number of output tokens that requests have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tailrace.cluster import RequestView

SAMPLE: Final = 64
"""Sample size for estimates over many requests."""


def mean_remaining_tokens(requests: Sequence[RequestView]) -> float:
    """Return the mean remaining output tokens of `requests`, which must not be empty.

    A request without a prediction is expected to make as many more tokens as it has made so far. That holds
    on average in a steady state for any distribution of lengths, since the age and the residual life of a
    renewal process have the same distribution.
    """
    predicted = ((r.predicted_remaining_tokens, r.output_tokens) for r in requests)
    return sum(made if remaining is None else remaining for remaining, made in predicted) / len(requests)
