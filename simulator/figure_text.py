"""Figures of a run as words for a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from simulator.estimate import Estimate

NOTHING: Final = "-"
# What a figure is multiplied with to be shown, and how: its heading says the unit.
Shown = tuple[str, float, Callable[[float], str]]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _significant(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


SHOWN: Final[Mapping[str, Shown]] = {
    "attainment": ("SLO %", 100.0, _tenths),
    "goodput_per_s": ("GOODPUT/S", 1.0, _significant),
    "ttft_p50_s": ("TTFT P50 S", 1.0, _seconds),
    "ttft_p99_s": ("TTFT P99 S", 1.0, _seconds),
    "tpot_p50_s": ("TPOT P50 MS", 1e3, _tenths),
    "tpot_p99_s": ("TPOT P99 MS", 1e3, _tenths),
    "latency_p50_s": ("E2E P50 S", 1.0, _seconds),
    "latency_p99_s": ("E2E P99 S", 1.0, _seconds),
    "tokens_per_s": ("TOKENS/S", 1.0, _significant),
}


def text(figure: str, value: float) -> str:
    """A value as its column shows it."""
    _, factor, words = SHOWN[figure]
    return words(value * factor) if math.isfinite(value) else NOTHING


def interval_text(figure: str, value: Estimate) -> str:
    """`mean ±half width`; the mean alone of a single run."""
    mean = text(figure, value.mean)
    return mean if value.half_width is None else f"{mean} ±{text(figure, value.half_width)}"
