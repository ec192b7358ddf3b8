"""How many tokens requests are still to make, on average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tailrace.cluster import RequestView

SAMPLE: Final = 64
"""Requests that are looked at where there may be many."""


def mean_remaining_tokens(requests: Sequence[RequestView]) -> float:
    """Mean over `requests`, of which there is at least one.

    A request whose remaining length is not predicted makes, on average, as many tokens more as it has made by
    now, which holds for any distribution of lengths in a steady state (the age and the residual life of a
    renewal process have one distribution).
    """
    predicted = ((r.predicted_remaining_tokens, r.output_tokens) for r in requests)
    return sum(made if remaining is None else remaining for remaining, made in predicted) / len(requests)
