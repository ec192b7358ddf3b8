"""Length penalties: the slowdown of a decode step by unequal lengths (CascadeInfer, section 2.3).

Attention kernels are slower on a batch of unequal lengths than on one of equal lengths with as many tokens.
Reports differ on how much: a few percent as measured on one recent kernel, a factor of 1.1 to 2.1 in
CascadeInfer's figure 2. A penalty is a JSON file; built-in ones are in `penalties/`, each with its source,
and `load_length_penalty` takes a built-in name or a path.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.bounded import read_regular, shown

BUILT_IN: Final[Path] = Path(__file__).resolve().parent / "penalties"

# The name for no penalty.
NONE: Final = "none"


class TowardsLongest(msgspec.Struct, frozen=True, kw_only=True, tag="towards_longest"):
    """A penalty as if every length were `weight` of the way from the mean to the longest.

    Factor 1 + weight (longest/mean - 1), with longest/mean at most `most`. The weight depends on the batch
    size: `weights[i]` at `batch_sizes[i]` (ascending), linear in the logarithm between, constant beyond.
    """

    batch_sizes: tuple[int, ...]
    weights: tuple[float, ...]
    most: float

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent columns."""
        sizes = self.batch_sizes
        if not sizes or len(sizes) != len(self.weights) or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError("batch_sizes must ascend from 1 or more, with one weight each")

    def factor(self, requests: int, mean: float, longest: float) -> float:
        """Return the factor for a batch of `requests` with these mean and longest lengths."""
        return 1.0 + self._weight(requests) * (min(longest / mean, self.most) - 1.0)

    def _weight(self, requests: int) -> float:
        sizes, weights = self.batch_sizes, self.weights
        right = bisect_left(sizes, requests)
        if right == 0 or right == len(sizes):
            return weights[min(right, len(sizes) - 1)]
        left = right - 1
        share = log(requests / sizes[left]) / log(sizes[right] / sizes[left])
        return weights[left] + share * (weights[right] - weights[left])


class Saturating(msgspec.Struct, frozen=True, kw_only=True, tag="saturating"):
    """A penalty from 1 for equal lengths up to `most` for a batch dominated by one request.

    Factor 1 + (most - 1) (1 - mean/longest).
    """

    most: float

    def factor(self, requests: int, mean: float, longest: float) -> float:
        """Return the factor, which is independent of the number of requests."""
        return 1.0 + (self.most - 1.0) * (1.0 - mean / longest)


class FittedLengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """Slowdown of a decode step by the spread of lengths in its batch (CascadeInfer, figure 2), as read from
    its file. A factor of 1.0: none."""

    name: str
    shape: TowardsLongest | Saturating
    # What is slowed down: the part of a step that grows with KV tokens, or its whole decode part.
    applies_to: Literal["attention", "step"]
    # Its origin, the assumptions made, and the license terms.
    source: str
    licence: str

    def attention_factor(self, lengths: NDArray[np.int64]) -> float:
        """Return the factor on the time per KV token; `lengths`: context tokens, shape [requests]."""
        return self._factor(lengths) if self.applies_to == "attention" else 1.0

    def step_factor(self, lengths: NDArray[np.int64]) -> float:
        """Return the factor on the decode part of a step, base included; `lengths` as above."""
        return self._factor(lengths) if self.applies_to == "step" else 1.0

    def _factor(self, lengths: NDArray[np.int64]) -> float:
        requests = len(lengths)
        if requests < 2:
            return 1.0
        longest = float(lengths.max())
        if longest <= 0.0:
            return 1.0
        return self.shape.factor(requests, float(lengths.sum()) / requests, longest)


class LengthPenaltyError(Exception):
    """The penalty does not exist or is malformed; the message says why."""


def built_in_penalties() -> list[str]:
    """Return the names of the built-in penalties, including `none`."""
    return sorted([NONE, *(path.stem for path in BUILT_IN.glob("*.json"))])


def load_length_penalty(name: str) -> FittedLengthPenalty | None:
    """Load a built-in penalty by name, or the JSON file at the path `name`; return None for `none`.

    Raise LengthPenaltyError.
    """
    if name == NONE:
        return None
    path = BUILT_IN / f"{name}.json" if name in built_in_penalties() else Path(name)
    try:
        return msgspec.json.decode(read_regular(path), type=FittedLengthPenalty)
    except OSError as error:
        known = ", ".join(built_in_penalties())
        raise LengthPenaltyError(
            f"no length penalty {shown(name)}: {error.strerror}; built in are {known}"
        ) from error
    except msgspec.DecodeError as error:
        raise LengthPenaltyError(f"length penalty {name!r}: {error}") from error
