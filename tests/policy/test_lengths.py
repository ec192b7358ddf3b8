"""The window drops entries older than its period, counts all others once, and is bounded in size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.lengths import PARTS, ROWS_MAX, LengthStatistics, LengthWindow
from tests.policy.fleets import quick

PERIOD_S = 12.0
PART_S = PERIOD_S / PARTS


@quick
@given(st.floats(0.0, 1e6), st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=80))
def test_the_statistics_contain_exactly_the_events_of_the_period(
    start_s: float, events: list[tuple[float, bool]]
) -> None:
    window, now_s = LengthWindow(PERIOD_S, start_s), start_s
    seen: list[tuple[float, int, bool]] = []
    for number, (gap_s, finishes) in enumerate(events, start=1):
        now_s += gap_s
        seen.append((now_s, number, finishes))
        if finishes:
            window.finished(number, 10 * number, now_s)
        else:
            window.arrived(number, now_s)
        statistics = window.statistics(now_s)
        assert statistics.seconds <= min(now_s - start_s, PERIOD_S + PART_S) + 1e-6
        assert statistics.seconds >= min(now_s - start_s, PERIOD_S) - 1e-6
        arrived, weights = statistics.arrived()
        prompts, outputs, more_weights = statistics.finished()
        assert set(weights) | set(more_weights) <= {1.0}
        assert (outputs == 10 * prompts).all()
        kept = sorted([*arrived.tolist(), *prompts.tolist()])
        # Exactly the events of the stated period; events at its start are on a boundary between parts.
        since_s = now_s - statistics.seconds
        assert {n for at_s, n, _ in seen if at_s > since_s + 1e-6} <= set(kept)
        assert {n for at_s, n, _ in seen if at_s >= since_s - 1e-6} >= set(kept)
        assert len(set(kept)) == len(kept)


def test_returned_statistics_are_immutable() -> None:
    window = LengthWindow(PERIOD_S, 0.0)
    window.finished(5, 7, 0.5)
    before = window.statistics(1.5)
    window.finished(6, 8, 1.6)
    window.arrived(9, 50.0)
    assert [column.tolist() for column in before.finished()] == [[5], [7], [1.0]]
    after = window.statistics(50.0)
    assert [column.tolist() for column in after.finished()] == [[], [], []]
    assert after.arrived()[0].tolist() == [9]


def test_a_large_part_is_sampled_evenly_with_weights() -> None:
    window = LengthWindow(PERIOD_S, 0.0)
    count = 3 * ROWS_MAX
    for number in range(count):
        window.finished(number % 1_000, 1 + number, 0.1)
    prompts, outputs, weights = window.statistics(0.2).finished()
    assert len(prompts) < ROWS_MAX
    assert weights.sum() == pytest.approx(count, rel=0.01)
    assert float((outputs * weights).sum() / weights.sum()) == pytest.approx(count / 2, rel=0.01)
    assert np.diff(outputs).tolist() == [4] * (len(outputs) - 1)


def test_statistics_from_lists_and_invalid_periods() -> None:
    statistics = LengthStatistics.of(60.0, [3, 4], [(1, 2)])
    assert statistics.arrived()[0].tolist() == [3, 4]
    assert [column.tolist() for column in statistics.finished()] == [[1], [2], [1.0]]
    empty = LengthStatistics.of(60.0, [], [])
    assert [len(column) for column in (*empty.arrived(), *empty.finished())] == [0] * 5
    for period_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="period"):
            LengthWindow(period_s, 0.0)
