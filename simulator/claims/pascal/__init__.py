"""PASCAL's claims, rows P1 to P15 of the papers' numbers (HPCA'26, arXiv 2602.11530)."""

from __future__ import annotations

from simulator.claims.base import Experiment
from simulator.claims.pascal.fidelity import FIDELITY
from simulator.claims.pascal.serving import SERVING
from simulator.claims.pascal.single import SINGLE

EXPERIMENTS: tuple[Experiment, ...] = (SERVING, SINGLE, FIDELITY)
