"""Format the figures of a run for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from simulator.estimate import Estimate

NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Shown:
    """How a figure is displayed: its heading with the unit, and the factor by which it is multiplied."""

    heading: str
    factor: float = 1.0
    # Least number of significant digits; no digit before the decimal point is dropped.
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
    """Format the mean of a figure."""
    shown = SHOWN[figure]
    mean = value.mean * shown.factor
    return f"{mean:,.{_decimals(mean, shown.digits)}f}" if math.isfinite(mean) else NOTHING


def half_text(figure: str, value: Estimate) -> str:
    """Format half of the confidence interval with the decimals of the mean; "" for a single run."""
    shown = SHOWN[figure]
    if value.half_width is None or not math.isfinite(value.half_width):
        return ""
    places = _decimals(value.mean * shown.factor, shown.digits)
    return f"±{value.half_width * shown.factor:,.{places}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the decimals that display this many significant digits."""
    if not math.isfinite(value) or value == 0.0:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
