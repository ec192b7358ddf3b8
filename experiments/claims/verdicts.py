"""Read and format figures of runs, and derive verdicts from pairs of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec

from experiments.claims.base import Claim, Figures, Finding, RunFailedError, Verdict
from simulator.estimate import Estimate

P = ParamSpec("P")
Judge = Callable[[Mapping[str, Figures]], Sequence[Finding]]


def number(figures: Figures, name: str) -> float:
    """Return a figure that is a number. Raise TypeError if it is a list."""
    value = figures[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is not a number")
    return float(value)


def numbers(figures: Figures, name: str) -> Sequence[float]:
    """Return a figure that is a list. Raise TypeError if it is a number."""
    value = figures[name]
    if isinstance(value, (int, float)):
        raise TypeError(f"{name} is not a list")
    return value


def format_estimate(found: Estimate, form: str) -> str:
    """Format a mean and its spread, as "12% ± 3%"; `form` is a format specification. A single seed has no
    spread."""
    mean = format(found.mean, form)
    return mean if found.half_width is None else f"{mean} ± {format(found.half_width, form.lstrip('+'))}"


def spreads_of(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the half-widths of those that have one."""
    return {name: e.half_width for name, e in estimates.items() if e.half_width is not None}


def means_of(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the means."""
    return {name: e.mean for name, e in estimates.items()}


_ORDER = (Verdict.HOLDS, Verdict.EXCEEDS, Verdict.DIRECTION, Verdict.DOES_NOT_HOLD)


def judge_effect(ours: float, paper: float) -> Verdict:
    """Judge an effect: holds with the same sign and within a third of the paper's effect, on either side of
    it; exceeds if it is larger."""
    verdict = judge_value(ours, paper)
    return Verdict.EXCEEDS if verdict is Verdict.DIRECTION and abs(ours) > abs(paper) else verdict


def judge_value(ours: float, paper: float) -> Verdict:
    """Judge a number of which more is not a larger effect: holds with the same sign and within a third of the
    paper's."""
    if ours * paper <= 0.0:
        return Verdict.DOES_NOT_HOLD
    return Verdict.HOLDS if abs(ours - paper) <= abs(paper) / 3.0 else Verdict.DIRECTION


def judge_bound(ours: float, paper: float, limit: float) -> Verdict:
    """Judge something that should stay small: holds up to a third above the paper's number, direction up to
    `limit`."""
    if ours <= paper * 4.0 / 3.0:
        return Verdict.HOLDS
    return Verdict.DIRECTION if ours < limit else Verdict.DOES_NOT_HOLD


def judge_ordering(held: Sequence[bool]) -> Verdict:
    """Judge an ordering: holds if all of it holds; direction if more than half of it does."""
    if all(held):
        return Verdict.HOLDS
    return Verdict.DIRECTION if 2 * sum(held) > len(held) else Verdict.DOES_NOT_HOLD


def weakest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim with several parts."""
    return max(verdicts, key=_ORDER.index)


def judged(
    claims: Sequence[Claim],
    judge: Callable[P, Finding | Sequence[Finding]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Sequence[Finding]:
    """Return the findings of `judge(...)` on these claims. If it raises, none of them could be judged, for
    the reason that it gave: the other rows go on."""
    try:
        found = judge(*args, **kwargs)
    except RunFailedError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to these claims
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    else:
        return [found] if isinstance(found, Finding) else found
    return [Finding(claim.claim_id, "-", Verdict.NOT_JUDGED, why) for claim in claims]


def not_reproducible(reasons: Mapping[str, str]) -> Judge:
    """Return a judge that states for each claim why it cannot be checked here."""
    return partial(_not_reproducible, dict(reasons))


def _not_reproducible(reasons: Mapping[str, str], _: Mapping[str, Figures]) -> Sequence[Finding]:
    return [Finding(claim_id, "-", Verdict.NOT_REPRODUCIBLE, why) for claim_id, why in reasons.items()]
