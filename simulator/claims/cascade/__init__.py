"""CascadeInfer (arXiv 2512.19179): its claims and their experiments."""

from __future__ import annotations

from simulator.claims.base import WHOLE, Effort, Experiment
from simulator.claims.cascade.balance import balance
from simulator.claims.cascade.heavy import heavy
from simulator.claims.cascade.kernels import kernels
from simulator.claims.cascade.not_checked import not_checked
from simulator.claims.cascade.planning import planning
from simulator.claims.cascade.prediction import prediction


def experiments(effort: Effort) -> tuple[Experiment, ...]:
    """Return all rows of CascadeInfer."""
    return (heavy(effort), prediction(), planning(), balance(effort), kernels(), not_checked())


EXPERIMENTS: tuple[Experiment, ...] = experiments(WHOLE)
