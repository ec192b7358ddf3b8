"""Statistics of recent request lengths, for policies that plan from them.

A policy keeps no state, so the builder of its view keeps the window: the scheduler from placements and phase
events, the simulator from its own, both with the same code. What a policy gets is immutable.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# A period expires in so many parts.
PARTS: Final = 12
# Rows kept per part; if there are more, every second, fourth, ... one, which then stands for as many.
ROWS_MAX: Final = 8_192


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one part of the period, each standing for `weight` rows."""

    # Shape [n, columns], in tokens; read-only, as views of many moments share it.
    rows: Ints
    weight: int

    def __post_init__(self) -> None:
        self.rows.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class LengthStatistics:
    """Requests that arrived in the last `seconds`, and those that finished, whenever they arrived."""

    seconds: float
    # Columns: prompt tokens.
    arrived_parts: tuple[Rows, ...]
    # Columns: prompt tokens, output tokens.
    finished_parts: tuple[Rows, ...]

    def arrived(self) -> tuple[Ints, Floats]:
        """Return (prompt tokens, number of requests that each stands for)."""
        rows, weights = _joined(self.arrived_parts, 1)
        return rows[:, 0], weights

    def finished(self) -> tuple[Ints, Ints, Floats]:
        """Return (prompt tokens, output tokens, number of requests that each stands for)."""
        rows, weights = _joined(self.finished_parts, 2)
        return rows[:, 0], rows[:, 1], weights

    @staticmethod
    def of(seconds: float, arrived: Iterable[int], finished: Iterable[tuple[int, int]]) -> LengthStatistics:
        """Build statistics from arrived prompts and finished (prompt, output) pairs."""
        return LengthStatistics(
            seconds,
            (Rows(np.array([[prompt] for prompt in arrived], dtype=np.int64).reshape(-1, 1), 1),),
            (Rows(np.array(list(finished), dtype=np.int64).reshape(-1, 2), 1),),
        )


@dataclass(frozen=True, slots=True)
class SampleState:
    """A sample of rows: each `weight`-th of `seen`."""

    rows: list[tuple[int, ...]]
    seen: int
    weight: int


@dataclass(frozen=True, slots=True)
class LengthWindowState:
    """A window's state, to continue elsewhere. Parts: (end, arrived, finished), oldest first."""

    period_s: float
    began_s: float
    part_began_s: float
    past: list[tuple[float, SampleState, SampleState]]
    arrived: SampleState
    finished: SampleState


class LengthWindow:
    """Keep the last `period_s` seconds by the caller's monotonic clock."""

    def __init__(self, period_s: float, now_s: float) -> None:
        """`now_s`: when the window begins. Raise ValueError for an invalid period."""
        if not 0.0 < period_s < float("inf"):
            raise ValueError(f"a period of {period_s} s")
        self.period_s = period_s
        self._began_s = now_s
        self._part_s = period_s / PARTS
        # (its end, arrived, finished), oldest first.
        self._past: deque[tuple[float, Rows, Rows]] = deque()
        self._part_began_s = now_s
        self._arrived, self._finished = _Sample(1), _Sample(2)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """Add a request that arrived at the cluster."""
        self._turn(now_s)
        self._arrived.add((prompt_tokens,))

    def finished(self, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Add a request that generated its last token; an aborted one does not count."""
        self._turn(now_s)
        self._finished.add((prompt_tokens, output_tokens))

    def statistics(self, now_s: float) -> LengthStatistics:
        """Return the statistics of the period, precise to one part of it; of less if it has not lasted so
        long."""
        self._turn(now_s)
        forgotten = max(0, math.floor((now_s - self.period_s - self._began_s) / self._part_s))
        return LengthStatistics(
            now_s - self._began_s - forgotten * self._part_s,
            (*(arrived for _, arrived, _ in self._past), self._arrived.rows()),
            (*(finished for _, _, finished in self._past), self._finished.rows()),
        )

    def state(self) -> LengthWindowState:
        """Return the state that `restored` takes."""
        return LengthWindowState(
            self.period_s,
            self._began_s,
            self._part_began_s,
            [(end_s, _rows_state(arrived), _rows_state(finished)) for end_s, arrived, finished in self._past],
            self._arrived.state(),
            self._finished.state(),
        )

    @staticmethod
    def restored(state: LengthWindowState) -> LengthWindow:
        """Build a window from a recorded state."""
        window = LengthWindow(state.period_s, state.began_s)
        window._part_began_s = state.part_began_s
        window._past.extend(
            (end_s, _Sample.restored(1, arrived).rows(), _Sample.restored(2, finished).rows())
            for end_s, arrived, finished in state.past
        )
        window._arrived = _Sample.restored(1, state.arrived)
        window._finished = _Sample.restored(2, state.finished)
        return window

    def _turn(self, now_s: float) -> None:
        """Start a new part if the current one is over, and drop parts older than the period."""
        if now_s < self._part_began_s + self._part_s:
            return
        end_s = self._part_began_s + self._part_s
        self._past.append((end_s, self._arrived.rows(), self._finished.rows()))
        self._arrived, self._finished = _Sample(1), _Sample(2)
        # Empty parts are omitted, but their time counts.
        self._part_began_s += (now_s - self._part_began_s) // self._part_s * self._part_s
        while self._past and self._past[0][0] <= now_s - self.period_s:
            self._past.popleft()


class _Sample:
    """All rows, or an evenly spaced selection of them."""

    __slots__ = ("_columns", "_rows", "_seen", "_weight")

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[tuple[int, ...]] = []
        self._seen = 0
        self._weight = 1

    def add(self, row: tuple[int, ...]) -> None:
        if self._seen % self._weight == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) >= ROWS_MAX:
            self._rows = self._rows[::2]
            self._weight *= 2

    def state(self) -> SampleState:
        return SampleState(list(self._rows), self._seen, self._weight)

    @staticmethod
    def restored(columns: int, state: SampleState) -> _Sample:
        sample = _Sample(columns)
        sample._rows, sample._seen, sample._weight = list(state.rows), state.seen, state.weight
        return sample

    def rows(self) -> Rows:
        # A third of the time that numpy takes for a list of tuples, on each tick of thousands.
        numbers = np.fromiter(chain.from_iterable(self._rows), np.int64, len(self._rows) * self._columns)
        return Rows(numbers.reshape(-1, self._columns), self._weight)


def _rows_state(rows: Rows) -> SampleState:
    return SampleState([tuple(row) for row in rows.rows.tolist()], 0, rows.weight)


def _joined(parts: Iterable[Rows], columns: int) -> tuple[Ints, Floats]:
    chosen = [part for part in parts if len(part.rows)]
    if not chosen:
        return np.zeros((0, columns), dtype=np.int64), np.zeros(0)
    rows = np.concatenate([part.rows for part in chosen])
    return rows, np.repeat([float(part.weight) for part in chosen], [len(part.rows) for part in chosen])
