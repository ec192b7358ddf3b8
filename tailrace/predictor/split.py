"""Training, validation and test samples, split by request (ARES, section 4.4: 70%, 15%, 15%).

States of one request resemble each other, so a request whose samples were on both sides would be recognised
rather than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tailrace.predictor.samples import Samples

TRAINING: Final = 0.70
VALIDATION: Final = 0.15


@dataclass(frozen=True, slots=True)
class Split:
    """The three parts; no request is in two of them."""

    training: Samples
    validation: Samples
    test: Samples


def split_by_request(samples: Samples, seed: int) -> Split:
    """Split by a shuffle that only the seed decides. Raises ValueError for fewer than 10 requests."""
    requests = np.unique(samples.request)
    if len(requests) < 10:
        raise ValueError(f"{len(requests)} requests cannot be split: collect 10 or more")
    shuffled = np.random.default_rng(seed).permutation(requests)
    first, second = int(len(requests) * TRAINING), int(len(requests) * (TRAINING + VALIDATION))
    parts = (
        samples.of(np.isin(samples.request, chosen))
        for chosen in (shuffled[:first], shuffled[first:second], shuffled[second:])
    )
    return Split(*parts)
