"""Figures of a run as words for a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from simulator.estimate import Estimate

NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Shown:
    """How a figure is shown: its heading with the unit, and what it is multiplied with."""

    heading: str
    factor: float = 1.0
    # Least number of significant digits; figures above 100 lose none before the point.
    digits: int = 3


SHOWN: Final[Mapping[str, Shown]] = {
    "attainment": Shown("SLO %", 100.0),
    "goodput_per_s": Shown("GOODPUT/S"),
    "ttft_p50_s": Shown("TTFT P50 S"),
    "ttft_p99_s": Shown("TTFT P99 S"),
    "tpot_p50_s": Shown("TPOT P50 MS", 1e3),
    "tpot_p99_s": Shown("TPOT P99 MS", 1e3),
    "latency_p50_s": Shown("E2E P50 S"),
    "latency_p99_s": Shown("E2E P99 S"),
    "tokens_per_s": Shown("TOKENS/S"),
}


def mean_text(figure: str, value: Estimate) -> str:
    """The mean as its column shows it."""
    shown = SHOWN[figure]
    mean = value.mean * shown.factor
    return f"{mean:,.{_decimals(mean, shown.digits)}f}" if math.isfinite(mean) else NOTHING


def half_text(figure: str, value: Estimate) -> str:
    """Half of the interval, to as many places as the mean; "" of a single run."""
    shown = SHOWN[figure]
    if value.half_width is None or not math.isfinite(value.half_width):
        return ""
    places = _decimals(value.mean * shown.factor, shown.digits)
    return f"±{value.half_width * shown.factor:,.{places}f}"


def _decimals(value: float, digits: int) -> int:
    """Places after the point that show so many significant digits."""
    if not math.isfinite(value) or value == 0.0:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
