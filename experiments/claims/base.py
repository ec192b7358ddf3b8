"""Claims of papers, the experiments that check them, and the findings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """Seeds and size of an experiment: `share` is that of its requests, or of its simulated time."""

    name: str
    max_seeds: int
    share: float

    def seeds(self, whole: Sequence[T]) -> tuple[T, ...]:
        """Return the first of an experiment's seeds, or of whatever else distinguishes its samples."""
        return tuple(whole[: self.max_seeds])

    def of(self, whole: int) -> int:
        """Return the share of `whole` requests or seconds, at least one."""
        return max(1, round(whole * self.share))


WHOLE: Final = Effort("whole", 1_000, 1.0)
# Two seeds still have a spread; a third of the requests still reaches the operating point.
QUICK: Final = Effort("quick", 2, 1 / 3)


# Figures of one run by name, ready for JSON.
Figures = Mapping[str, float | Sequence[float]]


def plain_figures(figures: Figures) -> dict[str, float | list[float]]:
    """Return figures as JSON has them."""
    return {
        name: float(value) if isinstance(value, int | float) else [float(element) for element in value]
        for name, value in figures.items()
    }


@dataclass(frozen=True, slots=True)
class Claim:
    """One number or ordering that a paper reports."""

    claim_id: str
    paper: str
    # Figure, table or section.
    where: str
    statement: str
    # The paper's number as printed.
    number: str
    # What of the paper's own results went into the set-up; empty: none of them.
    inputs: str = ""


class Verdict(enum.Enum):
    """How our number compares to the paper's."""

    # Same direction, and the effect is within a third of the paper's (or the whole ordering holds).
    HOLDS = "holds"
    # Same direction, and more than a third larger than the paper's.
    EXCEEDS = "exceeds"
    # Same direction, another size.
    DIRECTION = "direction only"
    DOES_NOT_HOLD = "does not hold"
    # The row's own numbers went into the set-up.
    INPUT = "input"
    NEEDS_GPU = "needs a GPU"
    # Requires something else that a simulator does not have; `why` names it.
    NOT_REPRODUCIBLE = "not reproducible here"
    # A run that it needs failed, or its judge did; `why` says which and how.
    NOT_JUDGED = "could not be judged"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking one claim."""

    claim_id: str
    # Our number, formatted like the paper's.
    ours: str
    verdict: Verdict
    # One line that explains the agreement or the difference.
    why: str
    figures: Figures = field(default_factory=dict)
    # Half-widths of the 95% intervals over seeds (Student's t), by the names of the figures.
    spreads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One independent task of an experiment: `measure(*arguments)` in some process.

    Everything in it must be picklable; equal arguments give equal figures.
    """

    name: str
    measure: Callable[..., Figures]
    arguments: tuple[object, ...] = ()
    # Expected seconds on one core: the longest start first.
    cost_s: float = 10.0


class RunFailedError(Exception):
    """The figures of a failed run were asked for; the message has its name and its error."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs shared by several claims, and the judge of all their figures (by the runs' names)."""

    name: str
    claims: tuple[Claim, ...]
    runs: tuple[Run, ...]
    judge: Callable[[Mapping[str, Figures]], Sequence[Finding]]
