"""Means, intervals and who is the best."""

from __future__ import annotations

import math

import pytest

from simulator.estimate import Best, Estimate, best_of, estimate, t_quantile


def test_one_value_has_no_interval() -> None:
    assert estimate([3.0]) == Estimate(3.0, None)


def test_interval_of_student() -> None:
    # Standard deviation 1, three values: 4.303 / sqrt(3).
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))


def test_quantiles_fall_towards_the_normal() -> None:
    quantiles = [t_quantile(degrees) for degrees in range(1, 60)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == 1.960
    with pytest.raises(ValueError, match="at least two"):
        t_quantile(0)


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_the_best_and_those_like_it() -> None:
    # b is worse by 1 in each seed; c is worse on average, but not in each.
    values = {"a": [5.0, 6.0, 7.0], "b": [4.0, 5.0, 6.0], "c": [6.0, 4.0, 7.5]}
    assert best_of(values, 1) == Best("a", frozenset({"c"}))


def test_less_may_be_better() -> None:
    assert best_of({"a": [5.0, 6.0], "b": [4.0, 5.0]}, -1) == Best("b", frozenset())


def test_of_a_single_seed_only_equals_are_alike() -> None:
    assert best_of({"a": [5.0], "b": [5.0], "c": [4.9]}, 1) == Best("a", frozenset({"b"}))


def test_no_number_is_never_the_best() -> None:
    assert best_of({"a": [math.nan], "b": [1.0]}, -1) == Best("b", frozenset())
    assert best_of({"a": [math.nan]}, 1) is None
