"""PASCAL's claims, rows P1 to P17 of the papers' numbers (HPCA'26, arXiv 2602.11530)."""

from __future__ import annotations

from experiments.claims.base import WHOLE, Effort, Experiment
from experiments.claims.pascal.rows import FIDELITY
from experiments.claims.pascal.serving import serving_rows
from experiments.claims.pascal.single import one_gpu_rows


def experiments(effort: Effort) -> tuple[Experiment, ...]:
    """Return all rows of PASCAL."""
    return (serving_rows(effort), one_gpu_rows(effort), FIDELITY)


EXPERIMENTS: tuple[Experiment, ...] = experiments(WHOLE)
