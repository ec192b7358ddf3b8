"""ARES's claims, rows A1 to A12 of the papers' numbers (arXiv 2510.13668v1)."""

from __future__ import annotations

from experiments.claims.ares.predictor import PREDICTOR
from experiments.claims.ares.scale import scale_rows
from experiments.claims.ares.serving import serving_rows
from experiments.claims.base import WHOLE, Effort, Experiment


def experiments(effort: Effort) -> tuple[Experiment, ...]:
    """Return all rows of ARES."""
    return (serving_rows(effort), scale_rows(effort), PREDICTOR)


EXPERIMENTS: tuple[Experiment, ...] = experiments(WHOLE)
