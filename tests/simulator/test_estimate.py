"""Means, confidence intervals and the best policy."""

from __future__ import annotations

import math

import pytest

from simulator.estimate import Best, Estimate, best_of, estimate, t_quantile


def test_a_single_value_has_no_interval() -> None:
    assert estimate([3.0]) == Estimate(3.0, None)


def test_the_interval_follows_students_t() -> None:
    # Standard deviation 1, three values: 4.303 / sqrt(3).
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))


def test_t_quantiles_decrease_toward_the_normal_one() -> None:
    quantiles = [t_quantile(degrees) for degrees in range(1, 60)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == 1.960
    with pytest.raises(ValueError, match="at least two"):
        t_quantile(0)


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_the_best_policy_and_others_that_are_not_clearly_worse() -> None:
    # b is worse by 1 in each seed; c is worse on average, but not in each.
    values = {"a": [5.0, 6.0, 7.0], "b": [4.0, 5.0, 6.0], "c": [6.0, 4.0, 7.5]}
    assert best_of(values, 1) == Best("a", frozenset({"c"}))


def test_lower_can_be_better() -> None:
    assert best_of({"a": [5.0, 6.0], "b": [4.0, 5.0]}, -1) == Best("b", frozenset())


def test_with_a_single_seed_only_equal_values_tie() -> None:
    assert best_of({"a": [5.0], "b": [5.0], "c": [4.9]}, 1) == Best("a", frozenset({"b"}))


def test_nan_is_never_the_best() -> None:
    assert best_of({"a": [math.nan], "b": [1.0]}, -1) == Best("b", frozenset())
    assert best_of({"a": [math.nan]}, 1) is None
