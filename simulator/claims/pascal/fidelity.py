"""Row P15, which needs the paper's machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.claims.base import Experiment, Figures, Finding, Verdict
from simulator.claims.pascal.rows import P15


def judge(_: Mapping[str, Figures]) -> Sequence[Finding]:
    """Not to be had here."""
    why = (
        "needs vLLM 0.6.1 on an H100 to compare with; our simulator's own error against a real vLLM "
        "run is in "
        "docs/simulator-validation.md"
    )
    return (Finding(P15.claim_id, "-", Verdict.NOT_REPRODUCIBLE, why),)


FIDELITY: Final = Experiment("pascal-fidelity", (P15,), (), judge)
