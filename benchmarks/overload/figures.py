"""When requests are sent, and how two cases compare."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.harness.loadgen import StreamResult, percentile

# Resampled sets of turns with which the interval of a ratio is estimated.
_RESAMPLED = 2_000


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Results of the requests of one case. Times in seconds; `refused`: answered with 429."""

    case: str
    rate_per_s: float
    sent: int
    admitted: int
    refused: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    refused_p99_s: float

    @staticmethod
    def of(case: str, rate_per_s: float, results: Sequence[StreamResult]) -> LoadFigures:
        """Aggregate the results of a case."""
        admitted = [r for r in results if r.status == 200 and not r.error]
        refused = [r for r in results if r.status == 429]
        return LoadFigures(
            case,
            rate_per_s,
            len(results),
            len(admitted),
            len(refused),
            len(results) - len(admitted) - len(refused),
            percentile([r.ttft for r in admitted], 0.5),
            percentile([r.ttft for r in admitted], 0.99),
            percentile([r.finished - r.started for r in refused], 0.99),
        )


def at_random(rate_per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, in seconds."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
        yield at_s


def evenly(rate_per_s: float, seconds: float) -> Iterator[float]:
    """Yield evenly spaced times, in seconds."""
    for number in range(int(rate_per_s * seconds)):
        yield (number + 0.5) / rate_per_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """P99 TTFT of a case divided by that of another, over all turns, with the interval that contains 90% of
    the ratios of resampled sets of turns, and the smallest and largest ratio of a single turn."""

    case: str
    base: str
    ratio: float
    low: float
    high: float
    turn_min: float
    turn_max: float

    @staticmethod
    def of(case: str, base: str, turns: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
        """Compute it from the TTFTs of both cases in each turn, in seconds."""
        rng = random.Random(0)
        resampled = sorted(_p99_ratio(rng.choices(turns, k=len(turns))) for _ in range(_RESAMPLED))
        single = [_p99_ratio([turn]) for turn in turns]
        low, high = percentile(resampled, 0.05), percentile(resampled, 0.95)
        return Ratio(case, base, _p99_ratio(turns), low, high, min(single), max(single))

    def __str__(self) -> str:
        return (
            f"P99 TTFT, {self.case} / {self.base}: {self.ratio:.2f} "
            f"({self.low:.2f} to {self.high:.2f} in 90% of resampled sets of turns; "
            f"single turns {self.turn_min:.2f} to {self.turn_max:.2f})"
        )


def _p99_ratio(turns: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    case, base = ([ttft for turn in turns for ttft in turn[which]] for which in (0, 1))
    return percentile(case, 0.99) / percentile(base, 0.99)


def ttfts_of(results: Sequence[StreamResult]) -> list[float]:
    """Return the TTFTs of the requests that were answered."""
    return [result.ttft for result in results if result.status == 200 and not result.error]
