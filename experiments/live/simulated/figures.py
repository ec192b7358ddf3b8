"""Differences of counters and histograms between two scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from prometheus_client import Metric


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples by name and labels, at one point in time."""

    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @staticmethod
    def of(families: Iterable[Metric]) -> Counts:
        """Read the samples of a scrape."""
        return Counts(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in families
                for sample in family.samples
            }
        )

    def since(self, before: Counts) -> Counts:
        """Return the increase since an earlier scrape."""
        return Counts({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    def by(self, name: str, label: str, **wanted: str) -> dict[str, float]:
        """Return positive values by one label, of samples with these other labels."""
        found: dict[str, float] = {}
        for (sample, labels), value in self.samples.items():
            sample_labels = dict(labels)
            if sample == name and value > 0 and wanted.items() <= sample_labels.items():
                found[sample_labels[label]] = found.get(sample_labels[label], 0.0) + value
        return found

    def total(self, name: str, **wanted: str) -> float:
        """Return the sum of the samples with this name and these labels."""
        return sum(
            value
            for (sample, labels), value in self.samples.items()
            if sample == name and wanted.items() <= dict(labels).items()
        )

    def percentile(self, name: str, share: float, **wanted: str) -> float:
        """Return a percentile of a histogram, interpolated within its bucket; NaN if it is empty."""
        buckets = sorted(
            (float(bound), count) for bound, count in self.by(f"{name}_bucket", "le", **wanted).items()
        )
        if not buckets:
            return float("nan")
        goal = share * buckets[-1][1]
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= goal:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * (goal - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a figure."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Aggregate values; NaN without any."""
        column = np.fromiter(values, np.float64)
        if not len(column):
            return Spread(float("nan"), float("nan"), float("nan"))
        p50, p99 = np.percentile(column, [50, 99])
        return Spread(float(column.mean()), float(p50), float(p99))

    def __iter__(self) -> Iterator[float]:
        """Iterate over mean, P50 and P99."""
        yield from (self.mean, self.p50, self.p99)

    def over(self, other: Spread) -> Spread:
        """Return the ratios to another spread."""
        return Spread(*(_ratio(ours, theirs) for ours, theirs in zip(self, other, strict=True)))


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan")
