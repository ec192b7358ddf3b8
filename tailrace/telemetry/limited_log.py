"""Log what may happen hundreds of times a second: one line per kind and interval, with a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_INTERVAL_S: Final = 10.0


@dataclass(slots=True)
class _Kind:
    """When a message of this kind was logged, and how many have been left out since."""

    logged_s: float
    left_out: int = 0


class LimitedLog:
    """Log the first message of each kind at once, and then at most one per interval, which says how many were
    left out. Kinds must be few."""

    def __init__(
        self,
        log: logging.Logger,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds."""
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def write(self, level: int, kind: str, message: str) -> None:
        """Log a message of this kind at a level of `logging`, or count it."""
        now_s = self._clock()
        known = self._kinds.get(kind)
        if known is not None and now_s - known.logged_s < self._interval_s:
            known.left_out += 1
            return
        self._kinds[kind] = _Kind(now_s)
        if known is not None and known.left_out:
            seconds = now_s - known.logged_s
            message = f"{message} (and {known.left_out} more such messages in the last {seconds:.0f} s)"
        self._log.log(level, "%s", message)
