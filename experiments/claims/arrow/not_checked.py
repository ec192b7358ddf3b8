"""R1 to R4: comparisons with other engines, which a simulator of one engine cannot represent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from experiments.claims.base import Claim, Experiment
from experiments.claims.verdicts import Judge, not_reproducible


def without_traces(claims: Sequence[Claim]) -> Judge:
    """Return a judge for claims whose traces are missing."""
    return not_reproducible(
        {claim.claim_id: "needs the public traces: pass --traces DIR" for claim in claims}
    )


_ROWS: Final = (
    ("R1", "Azure Code", "5.62x / 7.78x"),
    ("R2", "BurstGPT", "3.60x / 5.04x"),
    ("R3", "Azure Conversation", "3.76x / 4.06x"),
    ("R4", "Mooncake", "3.73x / 4.14x"),
)
_WHY: Final = (
    "compares with vLLM over TP8 and with vLLM 0.7.3's disaggregation over 2 x TP4, whose KV path is "
    "slowed down by a bug: neither has published measurements to simulate from"
)


def not_checked() -> Experiment:
    """Return the rows, which need no runs."""
    claims = tuple(
        Claim(
            claim_id, "Arrow", "Fig. 7", f"{trace}: sustainable rate over vLLM / vLLM-disaggregated", number
        )
        for claim_id, trace, number in _ROWS
    )
    return Experiment(
        "arrow-end-to-end", claims, (), not_reproducible({claim.claim_id: _WHY for claim in claims})
    )
