"""Fits of times: exact for exact times, and robust to noise."""

from __future__ import annotations

import random

import pytest

from worker_agent.profiling.fitting import fit_times, r_squared


def test_exact_times_recover_their_coefficients() -> None:
    rows = [(1.0, b, k) for b in (1, 4, 16) for k in (100, 5_000, 90_000)]
    fit = fit_times(rows, [6e-3 + 1e-5 * b + 4e-8 * k for _, b, k in rows])
    assert fit.coefficients == pytest.approx((6e-3, 1e-5, 4e-8), rel=1e-9)
    assert fit.error < 1e-9 and fit.samples == 9


def test_no_coefficient_is_negative() -> None:
    # Times that decrease with the second column: its coefficient is 0, and the mean remains.
    fit = fit_times([(1.0, x) for x in range(1, 9)], [1.0 - 0.01 * x for x in range(1, 9)])
    assert fit.coefficients[1] == 0.0 and fit.coefficients[0] == pytest.approx(0.955, abs=0.01)


def test_the_fit_minimizes_relative_errors() -> None:
    rng = random.Random(1)
    rows = [(1.0, 2**power) for power in range(4, 15) for _ in range(5)]
    seconds = [(0.002 + 1e-5 * tokens) * rng.uniform(0.95, 1.05) for _, tokens in rows]
    fit = fit_times(rows, seconds)
    # Short times, a hundredth of the long ones, count as much.
    assert fit.coefficients[0] == pytest.approx(0.002, rel=0.1)
    assert 0.0 < fit.error < 0.05


@pytest.mark.parametrize(
    ("rows", "seconds", "match"),
    [
        ([], [], "no samples"),
        ([(1.0, 2.0)], [1.0], "too few"),
        ([(1.0, 2.0), (1.0, 3.0)], [0.0, 1.0], "too few"),
        ([(1.0,)], [1.0, 2.0], "do not go with"),
    ],
)
def test_impossible_fits_are_errors(rows: list[tuple[float]], seconds: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit_times(rows, seconds)


def test_r_squared() -> None:
    assert r_squared([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert r_squared([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0.0
    assert r_squared([5.0, 5.0], [5.0, 5.0]) == 1.0
