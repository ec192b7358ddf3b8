"""From two numbers to a verdict, by the same rule for every claim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.claims.base import Verdict

_ORDER = (Verdict.HOLDS, Verdict.DIRECTION, Verdict.DOES_NOT_HOLD)


def of_effect(ours: float, paper: float) -> Verdict:
    """Holds: same sign, and within a third of the paper's effect, on either side of it."""
    if ours * paper <= 0.0:
        return Verdict.DOES_NOT_HOLD
    return Verdict.HOLDS if abs(ours - paper) <= abs(paper) / 3.0 else Verdict.DIRECTION


def of_bound(ours: float, paper: float, most: float) -> Verdict:
    """Something that is to stay small: holds up to a third above the paper's number, direction up "
    "to `most`."""
    if ours <= paper * 4.0 / 3.0:
        return Verdict.HOLDS
    return Verdict.DIRECTION if ours < most else Verdict.DOES_NOT_HOLD


def of_ordering(held: Sequence[bool]) -> Verdict:
    """All of an ordering: holds; more than half of it: direction; else not."""
    if all(held):
        return Verdict.HOLDS
    return Verdict.DIRECTION if 2 * sum(held) > len(held) else Verdict.DOES_NOT_HOLD


def weakest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim of several parts."""
    return max(verdicts, key=_ORDER.index)
