"""Lengths of many requests, and requests from lengths and arrival times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.request import SimRequest

Tokens = NDArray[np.int64]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt, reasoning and answer; arrays with an entry per request."""

    prompt: Tokens
    reasoning: Tokens
    answer: Tokens

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.prompt)

    def requests(self, times: Times, prefix: str) -> list[SimRequest]:
        """Return a request for each of `times` (seconds), with ids `prefix`-0, `prefix`-1, ..."""
        columns = (times, self.prompt, self.reasoning, self.answer)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [SimRequest(f"{prefix}-{n}", *row) for n, row in enumerate(rows)]


# Draws the lengths of `count` requests from `rng`.
DrawLengths = Callable[[int, np.random.Generator], Lengths]


def tokens(values: ArrayLike, least: int = 1) -> Tokens:
    """Round to whole tokens, at least `least`."""
    rounded: Tokens = np.maximum(np.rint(np.asarray(values, dtype=np.float64)), least).astype(np.int64)
    return rounded


def lognormal(median: float, p99: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw `count` values from the lognormal distribution with that median and that 99th percentile."""
    # 2.3263: the 99th percentile of the standard normal distribution.
    return rng.lognormal(math.log(median), math.log(p99 / median) / 2.3263, count)


def lognormal_of_mean(mean: float, sigma: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw `count` values from the lognormal distribution with that mean; `sigma` is that of the
    logarithm."""
    return rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def blend(parts: Sequence[tuple[float, DrawLengths]], count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests, each of a kind with its probability (probabilities sum to 1)."""
    kinds = rng.choice(len(parts), size=count, p=[share for share, _ in parts])
    prompt, reasoning, answer = (np.zeros(count, np.int64) for _ in range(3))
    for index, (_, draw) in enumerate(parts):
        of_kind = kinds == index
        drawn = draw(int(of_kind.sum()), rng)
        prompt[of_kind], reasoning[of_kind], answer[of_kind] = drawn.prompt, drawn.reasoning, drawn.answer
    return Lengths(prompt, reasoning, answer)


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Quantiles `values` at `shares`; between two of them the logarithm of the value is linear.

    For lengths, which span orders of magnitude, that is the least surprising interpolation. Values may have
    any unit and must be above zero.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless shares rise from 0 to 1 and values are positive and do not fall."""
        if len(self.shares) != len(self.values) or len(self.shares) < 2:
            raise ValueError("a quantile table needs one value for each of at least two shares")
        if self.shares[0] != 0.0 or self.shares[-1] != 1.0 or not np.all(np.diff(self.shares) > 0):
            raise ValueError(f"shares must rise from 0 to 1: {self.shares}")
        if not self.values[0] > 0.0 or not np.all(np.diff(self.values) >= 0):
            raise ValueError(f"values must be above zero and must not fall: {self.values}")

    def at(self, shares: Floats) -> Floats:
        """Return the quantiles at `shares`, each in [0, 1]."""
        quantiles: Floats = np.exp(np.interp(shares, self.shares, np.log(self.values)))
        return quantiles

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` independent values."""
        return self.at(rng.random(count))

    def moment(self, power: int) -> float:
        """Return the exact mean of value ** power."""
        total = 0.0
        for index in range(len(self.shares) - 1):
            low, high = self.values[index] ** power, self.values[index + 1] ** power
            mean = low if high == low else (high - low) / math.log(high / low)
            total += mean * (self.shares[index + 1] - self.shares[index])
        return total

    def mean(self) -> float:
        """Return the mean."""
        return self.moment(1)

    def deviation(self) -> float:
        """Return the standard deviation."""
        return math.sqrt(self.moment(2) - self.moment(1) ** 2)


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Draws prompts and outputs independently; all of the output counts as answer."""

    prompt: QuantileTable
    output: QuantileTable

    def __call__(self, count: int, rng: np.random.Generator) -> Lengths:
        """Draw the lengths of `count` requests."""
        prompt, output = self.prompt.sample(count, rng), self.output.sample(count, rng)
        return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(output))
