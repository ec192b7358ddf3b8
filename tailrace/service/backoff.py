"""Delays between attempts to reach a peer."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Doubles from `first_s` to `most_s`, each delay drawn from its upper half.

    The draw keeps apart those that lost the same peer at the same moment.
    """

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait before the next attempt; at most `most_s`."""
        whole_s = min(self._most_s, self._first_s * 2.0**self._failures)
        if whole_s < self._most_s:
            self._failures += 1
        return whole_s * (1.0 + self._draw()) / 2.0

    def reset(self) -> None:
        """An attempt succeeded: begin with the shortest delay again."""
        self._failures = 0
