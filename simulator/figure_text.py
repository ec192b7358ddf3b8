"""Format the figures of a run for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from simulator.estimate import Estimate

NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class FigureFormat:
    """How a figure is displayed: its heading with the unit, and the factor by which it is multiplied."""

    heading: str
    factor: float = 1.0
    # Least number of significant digits; no digit before the decimal point is dropped.
    digits: int = 3


FIGURE_FORMATS: Final[Mapping[str, FigureFormat]] = {
    "attainment": FigureFormat("SLO %", 100.0),
    "goodput_per_s": FigureFormat("GOODPUT/S"),
    "ttft_p50_s": FigureFormat("TTFT P50 S"),
    "ttft_p99_s": FigureFormat("TTFT P99 S"),
    "tpot_p50_s": FigureFormat("TPOT P50 MS", 1e3),
    "tpot_p99_s": FigureFormat("TPOT P99 MS", 1e3),
    "latency_p50_s": FigureFormat("E2E P50 S"),
    "latency_p99_s": FigureFormat("E2E P99 S"),
    "tokens_per_s": FigureFormat("TOKENS/S"),
}


def mean_text(figure: str, value: Estimate) -> str:
    """Format the mean of a figure."""
    form = FIGURE_FORMATS[figure]
    mean = value.mean * form.factor
    return f"{mean:,.{_decimals(mean, form.digits)}f}" if math.isfinite(mean) else NOTHING


def half_text(figure: str, value: Estimate) -> str:
    """Format half of the confidence interval with the decimals of the mean; "" for a single run."""
    form = FIGURE_FORMATS[figure]
    if value.half_width is None or not math.isfinite(value.half_width):
        return ""
    places = _decimals(value.mean * form.factor, form.digits)
    return f"±{value.half_width * form.factor:,.{places}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the decimals that display this many significant digits."""
    if not math.isfinite(value) or value == 0.0:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
