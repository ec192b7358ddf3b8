"""CascadeInfer (arXiv 2512.19179): its claims and their experiments."""

from __future__ import annotations

from experiments.claims.base import WHOLE, Effort, Experiment
from experiments.claims.cascade.balance import balance
from experiments.claims.cascade.heavy import heavy
from experiments.claims.cascade.kernels import kernels
from experiments.claims.cascade.not_checked import not_checked
from experiments.claims.cascade.planning import planning
from experiments.claims.cascade.prediction import prediction


def experiments(effort: Effort) -> tuple[Experiment, ...]:
    """Return all rows of CascadeInfer."""
    return (heavy(effort), prediction(), planning(), balance(effort), kernels(), not_checked())


EXPERIMENTS: tuple[Experiment, ...] = experiments(WHOLE)
