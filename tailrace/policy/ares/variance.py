"""Time-weighted variance of token loads (equation 4), and how one migration changes it."""

from __future__ import annotations

from tailrace.perf.horizon import Floats


def time_weighted_variance(tokens: Floats, weights: Floats) -> float:
    """Equation 4 as it stands: sum_k weights[k] * Var_i(tokens[i, k]). `tokens`: [instances, steps]."""
    return float(tokens.var(axis=0) @ weights)


def change(load: Floats, source: Floats, target: Floats, weights: Floats, instances: int) -> float:
    """What equation 4 changes by when `load` (one entry a step) moves from source to target.

    The mean stays, so that only two squares change: (s - x)^2 - s^2 + (t + x)^2 - t^2 = 2x (x + t - s).
    """
    return float(2.0 / instances * ((load * (load + target - source)) @ weights))
