"""Durations as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

UNITS: Final = "ms, s, m, h or d"
_SECONDS: Final = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3_600),
    "d": Decimal(86_400),
}
_WITH_UNIT: Final = re.compile(r"\s*(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*(ms|s|m|h|d)\s*")


def in_seconds(text: str) -> str:
    """Return a duration with a unit (150ms, 2s, 5m, 1.5h, 7d) in seconds; any other text as it is."""
    found = _WITH_UNIT.fullmatch(text)
    return text if found is None else format((Decimal(found[1]) * _SECONDS[found[2]]).normalize(), "f")


def with_unit(seconds: float) -> str:
    """Return a duration as `in_seconds` reads it, in milliseconds if it is below a second."""
    return f"{seconds:g}s" if seconds >= 1.0 else f"{1e3 * seconds:g}ms"
