"""What a claim of a paper is, what it takes to check one, and what comes out."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


# Figures of one run by name, ready for JSON.
Figures = Mapping[str, float | Sequence[float]]


@dataclass(frozen=True, slots=True)
class Claim:
    """One number or ordering that a paper reports."""

    claim_id: str
    paper: str
    # Figure, table or section.
    where: str
    statement: str
    # The paper's number, as it is printed.
    number: str


class Verdict(enum.Enum):
    """How our number stands to the paper's."""

    # Same direction, and the effect within a third of the paper's (or the whole ordering).
    HOLDS = "holds"
    # Same direction, another size.
    DIRECTION = "direction only"
    DOES_NOT_HOLD = "does not hold"
    # Needs what a simulator does not have; `why` says what.
    NOT_REPRODUCIBLE = "not reproducible here"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one claim."""

    claim_id: str
    # Our number, printed like the paper's.
    ours: str
    verdict: Verdict
    # One line: what explains agreement or difference.
    why: str
    figures: Figures = field(default_factory=dict)
    # Half-widths of the 95% intervals over seeds (Student's t), by the names of the figures.
    spreads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One independent piece of work of an experiment: `measure(*arguments)` in some process.

    Everything in it can be pickled; equal arguments give equal figures.
    """

    name: str
    measure: Callable[..., Figures]
    arguments: tuple[object, ...] = ()
    # Expected seconds on one core: the longest start first.
    cost_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs shared by several claims, and the judgement over all their figures (by the runs' names)."""

    name: str
    claims: tuple[Claim, ...]
    runs: tuple[Run, ...]
    judge: Callable[[Mapping[str, Figures]], Sequence[Finding]]
