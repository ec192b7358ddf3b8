"""Token intervals of the last seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine.intervals import RecentIntervals


def test_nothing_yet() -> None:
    assert RecentIntervals().mean_and_p99_ms(5.0) == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0.02, 1e6), st.integers(1, 64)), min_size=1, max_size=60))
def test_mean_and_p99_are_those_of_all_tokens(steps: list[tuple[float, int]]) -> None:
    intervals = RecentIntervals()
    for ms, tokens in steps:
        intervals.add(100.0, ms, tokens)
    every = np.repeat([ms for ms, _ in steps], [tokens for _, tokens in steps])
    mean_ms, p99_ms = intervals.mean_and_p99_ms(100.5)
    assert mean_ms == pytest.approx(every.mean())
    exact = float(np.percentile(every, 99, method="inverted_cdf"))
    assert exact * 0.999 <= p99_ms <= exact * 1.045


def test_what_is_past_is_forgotten() -> None:
    intervals = RecentIntervals()
    intervals.add(10.0, 8.0)
    assert intervals.mean_and_p99_ms(10.9)[0] == pytest.approx(8.0)
    intervals.add(11.5, 2.0)
    assert intervals.mean_and_p99_ms(11.6)[0] == pytest.approx(5.0), "the second before counts still"
    intervals.add(12.6, 2.0)
    assert intervals.mean_and_p99_ms(12.7)[0] == pytest.approx(2.0)
    assert intervals.mean_and_p99_ms(99.0) == (0.0, 0.0)
