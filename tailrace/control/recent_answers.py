"""What the fleet's users got of late: TTFT, TPOT and SLO attainment of finished answers, and moves.

Pure; no decision depends on it. Workers report each answer as it finishes; a request that has moved counts
where it finished.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2

WINDOW_S: Final = 60.0
# Of one instance; of more within the window, the latest count.
_KEPT_MAX: Final = 4_096


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """One answer, as an SLO evaluates it (tailrace.slo.Answer)."""

    ttft_s: float
    tpot_s: float
    qoe: float
    reasoning_tokens: int

    @staticmethod
    def of(message: monitor_pb2.Answered) -> FinishedAnswer | None:
        """Return what a worker reports; None: not finite, from a faulty worker."""
        answer = FinishedAnswer(message.ttft_s, message.tpot_s, message.qoe, message.reasoning_tokens)
        finite = all(map(math.isfinite, (answer.ttft_s, answer.tpot_s, answer.qoe)))
        return answer if finite else None


@dataclass(frozen=True, slots=True)
class Recent:
    """What happened within the window, to one instance or to all."""

    answers: tuple[FinishedAnswer, ...]
    moves_in: int
    moves_out: int

    def attainment(self, slo: Slo) -> float:
        """Return the share of the answers that met the SLOs; 0.0 without answers."""
        return sum(map(slo.met_by, self.answers)) / max(1, len(self.answers))

    def ttft_s(self) -> tuple[float, float]:
        """Return P50 and P99; 0.0 without answers."""
        return _percentiles(answer.ttft_s for answer in self.answers)

    def tpot_s(self) -> tuple[float, float]:
        """Return P50 and P99; 0.0 without answers."""
        return _percentiles(answer.tpot_s for answer in self.answers)


def _percentiles(values: Iterable[float]) -> tuple[float, float]:
    column = np.fromiter(values, dtype=np.float64)
    if not len(column):
        return 0.0, 0.0
    half, most = np.percentile(column, (50.0, 99.0))
    return float(half), float(most)


def _kept() -> deque[float]:
    return deque(maxlen=_KEPT_MAX)


@dataclass(slots=True)
class _OfInstance:
    answers: deque[tuple[float, FinishedAnswer]] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))
    moves_in: deque[float] = field(default_factory=_kept)
    moves_out: deque[float] = field(default_factory=_kept)

    def drop_before(self, begin_s: float) -> None:
        while self.answers and self.answers[0][0] < begin_s:
            self.answers.popleft()
        for times in (self.moves_in, self.moves_out):
            while times and times[0] < begin_s:
                times.popleft()


class RecentAnswers:
    """Keep the answers and moves of the last minute, by instance. Times in seconds; they never decrease."""

    def __init__(self) -> None:
        self._known: dict[str, _OfInstance] = {}

    def finished(self, instance_id: str, answer: FinishedAnswer, now_s: float) -> None:
        """Add an answer that finished on the instance."""
        self._of(instance_id).answers.append((now_s, answer))

    def moved(self, source_id: str, target_id: str, now_s: float) -> None:
        """Add a request that has moved."""
        self._of(source_id).moves_out.append(now_s)
        self._of(target_id).moves_in.append(now_s)

    def keep_instances(self, known: Container[str]) -> None:
        """Forget all other instances."""
        self._known = {name: each for name, each in self._known.items() if name in known}

    def of(self, instance_id: str, now_s: float) -> Recent:
        """Return what happened to one instance."""
        return self._sum([self._known.get(instance_id, _OfInstance())], now_s)

    def of_all(self, now_s: float) -> Recent:
        """Return what happened to all instances."""
        return self._sum(self._known.values(), now_s)

    def _of(self, instance_id: str) -> _OfInstance:
        return self._known.setdefault(instance_id, _OfInstance())

    @staticmethod
    def _sum(instances: Iterable[_OfInstance], now_s: float) -> Recent:
        parts = list(instances)
        for each in parts:
            each.drop_before(now_s - WINDOW_S)
        return Recent(
            tuple(answer for each in parts for _, answer in each.answers),
            sum(len(each.moves_in) for each in parts),
            sum(len(each.moves_out) for each in parts),
        )
