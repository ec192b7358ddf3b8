"""R1 to R4: comparisons with other engines, which a simulator of one engine cannot represent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from simulator.claims.base import Claim, Experiment, Figures, Finding, Verdict

Judge = Callable[[Mapping[str, Figures]], Sequence[Finding]]


def without_traces(claims: Sequence[Claim]) -> Judge:
    """Return a judge for claims whose traces are missing."""
    return not_here({claim.claim_id: "needs the public traces: pass --traces DIR" for claim in claims})


def not_here(reasons: Mapping[str, str]) -> Judge:
    """Return a judge that states for each claim why it cannot be checked here."""
    return partial(_say, dict(reasons))


def _say(reasons: Mapping[str, str], _: Mapping[str, Figures]) -> Sequence[Finding]:
    return [Finding(claim_id, "-", Verdict.NOT_REPRODUCIBLE, why) for claim_id, why in reasons.items()]


_ROWS: Final = (
    ("R1", "Azure Code", "5.62x / 7.78x"),
    ("R2", "BurstGPT", "3.60x / 5.04x"),
    ("R3", "Azure Conversation", "3.76x / 4.06x"),
    ("R4", "Mooncake", "3.73x / 4.14x"),
)
_WHY: Final = (
    "compares with vLLM over TP8 and with vLLM 0.7.3's disaggregation over 2 x TP4, whose KV path is "
    "crippled by a bug: there are no measurements of either to simulate from"
)


def elsewhere() -> Experiment:
    """Return the rows, which need no runs."""
    claims = tuple(
        Claim(
            claim_id, "Arrow", "Fig. 7", f"{trace}: sustainable rate over vLLM / vLLM-disaggregated", number
        )
        for claim_id, trace, number in _ROWS
    )
    return Experiment("arrow-end-to-end", claims, (), not_here({claim.claim_id: _WHY for claim in claims}))
