"""What unequal lengths in a batch cost its decode step, as data (CascadeInfer, section 2.3).

Attention kernels are slower on a batch of unequal lengths than on one of equal lengths with as many tokens.
By how much is disputed: measurements of one recent kernel say a few percent, CascadeInfer's figure 2 says 1.1
to 2.1 times. A penalty is a JSON file; built-in ones stand in `penalties/`, each with its source, and
`load_length_penalty` takes their names or a path.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

BUILT_IN: Final[Path] = Path(__file__).resolve().parent / "penalties"

# The name that stands for no penalty at all.
NONE: Final = "none"


class TowardsLongest(msgspec.Struct, frozen=True, kw_only=True, tag="towards_longest"):
    """As if every length were `weight` of the way from the mean to the longest.

    Factor 1 + weight (longest/mean - 1), with longest/mean at most `most`. The weight depends on the batch
    size: `weights[i]` at `batch_sizes[i]` (ascending), linear in the logarithm between, constant beyond.
    """

    batch_sizes: tuple[int, ...]
    weights: tuple[float, ...]
    most: float

    def __post_init__(self) -> None:
        """Raises ValueError for columns that do not fit each other."""
        sizes = self.batch_sizes
        if not sizes or len(sizes) != len(self.weights) or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError("batch_sizes must ascend from 1 or more, with one weight each")

    def factor(self, requests: int, mean: float, longest: float) -> float:
        """The factor for a batch of so many requests."""
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
    """From 1 for equal lengths up to `most` for a batch that one request dwarfs.

    Factor 1 + (most - 1) (1 - mean/longest).
    """

    most: float

    def factor(self, requests: int, mean: float, longest: float) -> float:
        """The factor, whatever the number of requests."""
        return 1.0 + (self.most - 1.0) * (1.0 - mean / longest)


class FittedLengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """A penalty read from its file; implements `simulator.hooks.LengthPenalty`."""

    name: str
    shape: TowardsLongest | Saturating
    # What is slowed down: the part of a step that grows with KV tokens, or all of its decode part.
    applies_to: Literal["attention", "step"]
    # Where it is from, on what terms, and what had to be assumed.
    source: str
    licence: str

    def attention_factor(self, lengths: NDArray[np.int64]) -> float:
        """Factor on the time per KV token; `lengths`: context tokens, shape [requests]."""
        return self._factor(lengths) if self.applies_to == "attention" else 1.0

    def step_factor(self, lengths: NDArray[np.int64]) -> float:
        """Factor on the decode part of the step; `lengths`: context tokens, shape [requests]."""
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
    """There is no such penalty, or it is malformed; the message says which and why."""


def built_in_penalties() -> list[str]:
    """Names that come with Tailrace, `none` among them."""
    return sorted([NONE, *(path.stem for path in BUILT_IN.glob("*.json"))])


def load_length_penalty(name: str) -> FittedLengthPenalty | None:
    """A built-in penalty by name, or the JSON file at the path `name`; None for `none`.

    Raises LengthPenaltyError.
    """
    if name == NONE:
        return None
    path = BUILT_IN / f"{name}.json" if name in built_in_penalties() else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=FittedLengthPenalty)
    except OSError as error:
        known = ", ".join(built_in_penalties())
        raise LengthPenaltyError(
            f"no length penalty {name!r}: {error.strerror}; built in are {known}"
        ) from error
    except msgspec.DecodeError as error:
        raise LengthPenaltyError(f"length penalty {name!r}: {error}") from error
