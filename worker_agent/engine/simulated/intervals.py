"""How long this engine's tokens took lately."""

from __future__ import annotations

from collections import deque
from typing import Final

_KEPT: Final = 512


class TokenIntervals:
    """Milliseconds between the last steps that decoded; each gave every request of the batch one token."""

    def __init__(self) -> None:
        self._ms: deque[float] = deque(maxlen=_KEPT)

    def add(self, ms: float) -> None:
        """One step took this long."""
        self._ms.append(ms)

    def mean_and_p99(self) -> tuple[float, float]:
        """(0, 0) when there was none."""
        if not self._ms:
            return 0.0, 0.0
        ordered = sorted(self._ms)
        return sum(ordered) / len(ordered), ordered[int(len(ordered) * 0.99)]
