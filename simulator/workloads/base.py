"""Workloads: requests in the order of arrival, their origin, and sections of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from simulator.request import SimRequest


class WorkloadError(Exception):
    """A workload cannot be created; the message names the file, line and field, or the invalid option."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of arrival. `source` describes their origin for display."""

    name: str
    requests: Sequence[SimRequest]
    source: str


@dataclass(frozen=True, slots=True)
class Clip:
    """A section: the first `count` requests that arrive in [start_s, start_s + duration_s).

    Times are those of the workload before any scaling; after the cut they count from start_s. None: no limit.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        """Raise WorkloadError for a window or a count that is always empty."""
        if not (self.start_s >= 0.0 and math.isfinite(self.start_s)):
            raise WorkloadError(f"a window begins at zero or later, not at {self.start_s} s")
        if self.duration_s is not None and not (self.duration_s > 0.0 and math.isfinite(self.duration_s)):
            raise WorkloadError(f"a window has a length above zero, not {self.duration_s} s")
        if self.count is not None and self.count < 1:
            raise WorkloadError(f"a workload needs at least one request, not {self.count}")

    @property
    def end_s(self) -> float:
        """Return the end of the window, exclusive."""
        return math.inf if self.duration_s is None else self.start_s + self.duration_s

    def cut(self, requests: Iterable[SimRequest]) -> list[SimRequest]:
        """Return the requests inside; `requests` are in the order of arrival and are read no further than
        necessary."""
        kept: list[SimRequest] = []
        for request in requests:
            if request.arrival_s >= self.end_s:
                break
            if request.arrival_s >= self.start_s:
                moved = replace(request, arrival_s=request.arrival_s - self.start_s)
                kept.append(moved if self.start_s else request)
                if len(kept) == self.count:
                    break
        return kept

    def describe(self) -> str:
        """Describe the section, to be appended to a source: " from ... to ..., of those the first ..."."""
        parts = []
        if self.start_s or self.duration_s is not None:
            end = "its end" if self.duration_s is None else f"{self.end_s:g} s"
            parts.append(f" from {self.start_s:g} s to {end}")
        if self.count is not None:
            parts.append(f" the first {self.count}" if not parts else f", of those the first {self.count}")
        return "".join(parts)


EVERYTHING = Clip()
