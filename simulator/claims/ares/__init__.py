"""ARES's claims, rows A1 to A12 of the papers' numbers (arXiv 2510.13668v1)."""

from __future__ import annotations

from simulator.claims.ares.predictor import PREDICTOR
from simulator.claims.ares.scale import SCALE
from simulator.claims.ares.serving import SERVING
from simulator.claims.base import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (SERVING, SCALE, PREDICTOR)
