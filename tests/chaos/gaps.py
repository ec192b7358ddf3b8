"""Attribute the gaps in a stream to the faults on the processes that served it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

NO_FAULT: Final = ""
"""Key of gaps without a known fault on the stream's own processes."""

# Tokens in flight when a fault ends may still arrive before the stream stalls.
_IN_FLIGHT_S: Final = 2.0


@dataclass(eq=False, slots=True)
class Exposure:
    """A fault on a process that served a stream. Times are seconds of time.perf_counter."""

    fault: str
    began_s: float = field(default_factory=time.perf_counter)
    ended_s: float = math.inf

    def end(self) -> None:
        """Record that the fault is undone."""
        self.ended_s = time.perf_counter()


def longest_gaps(event_times: Sequence[float], exposures: Sequence[Exposure]) -> Mapping[str, float]:
    """Return the stream's longest gap in seconds for each fault, and without one.

    A gap counts for a fault if it began before the fault ended, and only from the fault's beginning on. A
    stream may be hit by several faults in a row; each is to be charged with its own gap.
    """
    longest = {NO_FAULT: 0.0} | {exposure.fault: 0.0 for exposure in exposures}
    for began_s, ended_s in itertools.pairwise(event_times):
        during = [
            each for each in exposures if each.began_s < ended_s and began_s < each.ended_s + _IN_FLIGHT_S
        ]
        for each in during:
            longest[each.fault] = max(longest[each.fault], ended_s - max(began_s, each.began_s))
        if not during:
            longest[NO_FAULT] = max(longest[NO_FAULT], ended_s - began_s)
    return longest
