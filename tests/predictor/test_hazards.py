"""Piecewise constant hazards, compared with direct computation; and the Kaplan-Meier estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch comes with the engine")

import torch

from tailrace.predictor.evaluate import KaplanMeier
from tailrace.predictor.network import cumulative, edges_for, negative_log_likelihood, quantile

EDGES = torch.tensor([0.0, 1.0, 4.0, 10.0])
rates = st.lists(st.floats(1e-3, 2.0), min_size=3, max_size=3)


@given(rates=rates, tokens=st.floats(0.1, 12.0))
def test_the_likelihood_follows_from_the_hazard(rates: list[float], tokens: float) -> None:
    edges = EDGES.tolist()
    total = sum(
        rate * max(0.0, min(tokens, high) - low)
        for rate, low, high in zip(rates, edges, edges[1:], strict=False)
    )
    hazards, at = torch.tensor([rates]), torch.tensor([tokens])
    assert cumulative(hazards, EDGES, at).item() == pytest.approx(total, rel=1e-4)
    bin_ = min(2, next((k for k, high in enumerate(edges[1:]) if tokens <= high), 2))
    ended = negative_log_likelihood(hazards, EDGES, at, torch.tensor([True])).item()
    assert ended == pytest.approx(total - math.log(rates[bin_]), rel=1e-4, abs=1e-4)
    cut_off = negative_log_likelihood(hazards, EDGES, at, torch.tensor([False])).item()
    assert cut_off == pytest.approx(total, rel=1e-4)


@given(rates=rates, level=st.floats(0.02, 0.98), after=st.floats(0.0, 9.0))
def test_quantiles_invert_the_distribution(rates: list[float], level: float, after: float) -> None:
    hazards = torch.tensor([rates])
    tokens = quantile(hazards, EDGES, level)
    share = 1.0 - math.exp(-cumulative(hazards, EDGES, tokens).item())
    assert tokens.item() <= 10.0
    assert share == pytest.approx(level, abs=1e-4) if tokens.item() < 10.0 else share <= level + 1e-4
    more = quantile(hazards, EDGES, level, torch.tensor([after]))
    there = cumulative(hazards, EDGES, torch.tensor([after]) + more).item()
    here = cumulative(hazards, EDGES, torch.tensor([after])).item()
    share = 1.0 - math.exp(here - there)
    assert share == pytest.approx(level, abs=1e-3) if after + more.item() < 9.999 else share <= level + 1e-3


@given(longest=st.floats(0.0, 1e5))
def test_bins_increase_from_0_to_the_longest(longest: float) -> None:
    edges = edges_for(longest)
    assert edges[0] == 0.0 and edges[-1].item() == pytest.approx(max(2.0, longest), rel=1e-5)
    assert (edges[1:] > edges[:-1]).all()


def test_kaplan_meier_is_unbiased_by_cut_off_values() -> None:
    draw = np.random.default_rng(1)
    true = draw.exponential(100.0, 20_000)
    limit = draw.uniform(20.0, 400.0, 20_000)
    found = KaplanMeier(np.minimum(true, limit), true <= limit)
    for value in (20.0, 70.0, 200.0):
        assert found.share_within(value) == pytest.approx(1.0 - math.exp(-value / 100.0), abs=0.015)
    medians = found.median_after(np.array([0.0, 50.0, 100.0]))
    np.testing.assert_allclose(medians - [0.0, 50.0, 100.0], 100.0 * math.log(2.0), rtol=0.06)


def test_kaplan_meier_example() -> None:
    """With values 1, 2+ and 3, two remain after 1, of which one ends at 3."""
    found = KaplanMeier(np.array([1.0, 2.0, 3.0]), np.array([True, False, True]))
    assert found.share_within(0.5) == 0.0
    assert found.share_within(2.5) == pytest.approx(1 / 3)
    assert found.share_within(3.0) == 1.0
    assert found.median_after(np.array([5.0])).tolist() == [5.0]
    with pytest.raises(ValueError, match="no exact value"):
        KaplanMeier(np.array([1.0]), np.array([False]))
