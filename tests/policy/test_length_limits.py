"""The remaining length limit of a request bounds its prediction."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tailrace.perf.remaining import limited, tokens_left
from worker_agent.engine.base import EngineStats, RequestStats
from worker_agent.load import MigrationLoad, load_of


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "left"),
    [(0, 0, math.inf), (100, 0, 60.0), (0, 200, 110.0), (100, 200, 60.0), (100, 130, 40.0), (30, 200, 0.0)],
)
def test_the_smaller_limit_applies(max_tokens: int, max_model_len: int, left: float) -> None:
    assert tokens_left(50, 40, max_tokens, max_model_len) == left


@given(predicted=st.floats(0, 1e6), left=st.floats(0, 1e6) | st.just(math.inf))
def test_a_prediction_never_exceeds_the_limit(predicted: float, left: float) -> None:
    assert limited(predicted, left) == min(predicted, left)
    assert limited(None, left) is None


def test_a_prediction_below_zero_becomes_zero() -> None:
    assert limited(-0.5, 10.0) == 0.0


def test_without_a_known_context_length_only_max_tokens_limits() -> None:
    assert tokens_left(50, 40, 100) == 60.0


def test_a_request_without_prediction_counts_until_its_limit() -> None:
    """One of two requests has 100 tokens left: after those, only the other one counts."""
    requests = [
        RequestStats("a", "f", 0, Phase.ANSWERING, "running", 1_000, 100, 0, 200, 8, 1.0, 10.0),
        RequestStats(
            "b",
            "f",
            0,
            Phase.ANSWERING,
            "running",
            500,
            0,
            0,
            32_768,
            8,
            1.0,
            10.0,
            predicted_remaining_tokens=4_000.0,
        ),
    ]
    stats = EngineStats(requests, 16, 100, 0, 0, 0, 1, 1, 0, 10.0, 10.0)
    load = load_of(stats, 16, MigrationLoad(0, 0, None), None).future_load
    assert load[0] == 1_600.0
    assert load[1] == 500.0 + 256.0
