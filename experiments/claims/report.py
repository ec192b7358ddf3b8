"""The report of the papers' claims (`tailrace claims --report`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from experiments.claims.base import Verdict
from experiments.claims.catalogue import CheckedClaim
from simulator.report.page import Cell, cards, heading, page, table

# A verdict's symbol, so that it does not depend on colour, and its CSS class.
_SIGNS: Final[Mapping[Verdict, tuple[str, Literal["yes", "partly", "no", "unknown"]]]] = {
    Verdict.HOLDS: ("✓", "yes"),
    Verdict.EXCEEDS: ("✓", "yes"),
    Verdict.DIRECTION: ("~", "partly"),
    Verdict.DOES_NOT_HOLD: ("✗", "no"),
    Verdict.INPUT: ("–", "unknown"),
    Verdict.NEEDS_GPU: ("–", "unknown"),
    Verdict.NOT_REPRODUCIBLE: ("–", "unknown"),
    Verdict.NOT_JUDGED: ("?", "unknown"),
}
_SUBTITLE: Final = (
    "Holds: same direction, within a third of the paper's effect. Exceeds: more than that. Direction only: "
    "less. Input: the row's own number went into the set-up. All rows of a paper run with the same defaults."
)


def claims_report(checked: Sequence[CheckedClaim]) -> str:
    """Return the report as an HTML document."""
    counts = Counter(claim.finding.verdict for claim in checked)
    body = [cards([(verdict.value, f"{counts[verdict]}") for verdict in Verdict if counts[verdict]])]
    for paper in dict.fromkeys(claim.claim.paper for claim in checked):
        body += [heading(paper), _table([claim for claim in checked if claim.claim.paper == paper])]
    return page("The papers' claims, in the simulator", _SUBTITLE, body)


def _table(checked: Sequence[CheckedClaim]) -> str:
    rows = []
    for claim in checked:
        sign, kind = _SIGNS[claim.finding.verdict]
        rows.append(
            [
                Cell(claim.claim.claim_id),
                Cell(claim.claim.statement, claim.claim.where),
                Cell(claim.claim.number),
                Cell(claim.finding.ours),
                Cell(f"{sign} {claim.finding.verdict.value}", standing=kind),
                Cell(
                    claim.finding.why, f"from the paper: {inputs}" if (inputs := claim.claim.inputs) else ""
                ),
            ]
        )
    return table(["", "claim", "paper's", "ours", "verdict", "why"], rows, text_columns=(1, 2, 3, 4, 5))
