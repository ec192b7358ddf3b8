"""How much work goes into a check: the whole, or a quick look at the same operating points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """Seeds and requests of an experiment. `share` is that of its requests, or of its simulated time."""

    name: str
    most_seeds: int
    share: float

    def seeds(self, whole: Sequence[T]) -> tuple[T, ...]:
        """The first of an experiment's seeds, or of whatever else tells its samples apart."""
        return tuple(whole[: self.most_seeds])

    def of(self, whole: int) -> int:
        """So many of `whole` requests or seconds, at least one."""
        return max(1, round(whole * self.share))


WHOLE: Final = Effort("whole", 1_000, 1.0)
# Two seeds still have a spread; a third of the requests still reaches the operating point.
QUICK: Final = Effort("quick", 2, 1 / 3)
