"""Periods are exact in number, whatever the ticks that tell of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.policy.cascade.policy import periods_elapsed
from tests.policy.fleets import quick

# Seconds since the epoch are as good as seconds since the start.
STARTS = st.sampled_from([0.0, 12.75, 1_790_000_000.25])


@quick
@given(STARTS, st.lists(st.floats(0.0, 300.0), min_size=1, max_size=60), st.sampled_from([0.5, 5.0, 60.0]))
def test_each_period_is_counted_once(start_s: float, gaps_s: list[float], period_s: float) -> None:
    ticks = [start_s]
    for gap_s in gaps_s:
        ticks.append(ticks[-1] + gap_s)
    counted = sum(periods_elapsed(period_s, last_s, now_s) for last_s, now_s in pairwise(ticks))
    assert counted == math.floor(ticks[-1] / period_s) - math.floor(ticks[0] / period_s)


@pytest.mark.parametrize("late_s", [0.02, 0.1, 0.3])
def test_late_ticks_miss_nothing(late_s: float) -> None:
    """By "is a multiple inside the last interval", 2, 9 and 23% were missed at this lateness."""
    ticks = [0.0]
    while ticks[-1] < 10_000.0:
        ticks.append(ticks[-1] + 1.0 + late_s)
    worked = sum(periods_elapsed(5.0, last_s, now_s) > 0 for last_s, now_s in pairwise(ticks))
    assert worked == int(ticks[-1] // 5.0)


def test_ends_of_what_can_be_known() -> None:
    assert periods_elapsed(5.0, None, 3.0) == 1
    assert periods_elapsed(math.inf, None, 3.0) == periods_elapsed(math.inf, 0.0, 1e9) == 0
    # A clock that was set back goes on from there.
    assert periods_elapsed(5.0, 100.0, 3.0) == 0
    assert periods_elapsed(5.0, 3.0, 5.0) == 1
