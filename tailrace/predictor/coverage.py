"""How far the quantiles of a predictor hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.predictor.file import Predictor
from tailrace.predictor.kaplan_meier import KaplanMeier
from tailrace.predictor.samples import Samples

LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that are tested."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the samples had no more to come than the quantile `level` said: `level` of them, if the
    quantiles are right."""

    level: float
    share: float


def coverage(predictor: Predictor, samples: Samples) -> list[Coverage]:
    """By the rank of each sample in what was predicted for it; that of one that was cut off is known to be
    above the rank of what came. Raises ValueError when all were cut off."""
    ranks = KaplanMeier(predictor.share_within(samples.hidden, samples.remaining), samples.ended)
    return [Coverage(level, ranks.share_within(level)) for level in LEVELS]
