"""Token intervals over the last seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine.step_times import RecentIntervals


def test_no_intervals_yet() -> None:
    assert RecentIntervals().mean_and_p99_ms(5.0) == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0.02, 1e6), st.integers(1, 64)), min_size=1, max_size=60))
def test_mean_and_p99_cover_all_tokens(steps: list[tuple[float, int]]) -> None:
    intervals = RecentIntervals()
    for ms, tokens in steps:
        intervals.add(100.0, ms, tokens)
    every = np.repeat([ms for ms, _ in steps], [tokens for _, tokens in steps])
    mean_ms, p99_ms = intervals.mean_and_p99_ms(100.5)
    assert mean_ms == pytest.approx(every.mean())
    exact = float(np.percentile(every, 99, method="inverted_cdf"))
    assert exact * 0.999 <= p99_ms <= exact * 1.045


def test_old_intervals_are_dropped() -> None:
    intervals = RecentIntervals()
    intervals.add(10.0, 8.0)
    assert intervals.mean_and_p99_ms(10.9)[0] == pytest.approx(8.0)
    intervals.add(11.5, 2.0)
    assert intervals.mean_and_p99_ms(11.6)[0] == pytest.approx(5.0), "the previous second still counts"
    intervals.add(12.6, 2.0)
    assert intervals.mean_and_p99_ms(12.7)[0] == pytest.approx(2.0)
    assert intervals.mean_and_p99_ms(99.0) == (0.0, 0.0)


def test_a_batch_order_is_told_the_mean_and_that_of_the_fastest_second() -> None:
    intervals = RecentIntervals()
    intervals.add(10.0, 8.0, 31)
    intervals.add(11.5, 20.0, 40)
    assert intervals.summary(11.6, 1e9) is None, "a second with few intervals could be an accident"
    intervals.add(13.0, 40.0, 60)
    told = intervals.summary(13.1, 1e9)
    assert told is not None and told.now_s == 1e9
    assert (told.mean_s, told.shortest_s) == pytest.approx(((40 * 0.02 + 60 * 0.04) / 100, 0.02))
    assert intervals.summary(99.0, 1e9) is None
