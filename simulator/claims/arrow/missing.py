"""What a row says that needs the traces when they are not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from simulator.claims.base import Claim, Figures, Finding, Verdict

Judge = Callable[[Mapping[str, Figures]], Sequence[Finding]]


def without_traces(claims: Sequence[Claim]) -> Judge:
    """A judge that needs no runs."""
    return not_here({claim.claim_id: "needs the public traces: pass --traces DIR" for claim in claims})


def not_here(reasons: Mapping[str, str]) -> Judge:
    """A judge that says of each claim why it cannot be checked here."""
    return partial(_say, dict(reasons))


def _say(reasons: Mapping[str, str], _: Mapping[str, Figures]) -> Sequence[Finding]:
    return [Finding(claim_id, "-", Verdict.NOT_REPRODUCIBLE, why) for claim_id, why in reasons.items()]
