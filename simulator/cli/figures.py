"""Figures as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tailrace.cli.plain import JsonValue


def plain(figures: Mapping[str, int | float]) -> dict[str, JsonValue]:
    """For JSON, which has no NaN: null."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
