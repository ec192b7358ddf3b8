"""`make bench-overload`: when its tenants send, and how it compares two cases."""

from __future__ import annotations

import random

import pytest

from benchmarks.overload.figures import Ratio, at_random, evenly
from experiments.overload import metered, own_ttfts


def test_a_tenant_at_its_limit_sends_evenly() -> None:
    assert list(evenly(2.0, 2.0)) == [0.25, 0.75, 1.25, 1.75]
    assert len(list(evenly(1.0, 20.0))) == 20


def test_arrivals_at_random_have_the_rate_and_are_the_same_for_a_seed() -> None:
    times = list(at_random(10.0, 100.0, 1))
    assert times == sorted(times) == list(at_random(10.0, 100.0, 1)) and times[-1] < 100.0
    assert len(times) == pytest.approx(1_000, rel=0.15)


def test_a_ratio_is_of_all_turns_together() -> None:
    # A single turn is twice as slow, and has most of the slowest requests of the case.
    usual = [number / 100 for number in range(1, 101)]
    turns = [(usual, usual)] * 3 + [([2 * each for each in usual], usual)]
    ratio = Ratio.of("slow", "usual", turns)
    assert (ratio.turn_min, ratio.turn_max) == (1.0, 2.0)
    assert ratio.low <= ratio.ratio <= ratio.high
    assert ratio.ratio == pytest.approx(1.94, abs=0.05) and ratio.low == 1.0
    assert str(ratio).startswith("P99 TTFT, slow / usual: 1.9")


def test_the_interval_lies_within_the_single_turns_and_around_the_ratio() -> None:
    draw = random.Random(3)
    turns = [
        ([draw.expovariate(1) for _ in range(200)], [draw.expovariate(1) for _ in range(200)])
        for _ in range(8)
    ]
    ratio = Ratio.of("a", "b", turns)
    assert ratio.turn_min < ratio.low < ratio.ratio < ratio.high < ratio.turn_max
    assert ratio.ratio == pytest.approx(1.0, abs=0.25)


def test_a_tenant_beyond_its_limit_is_admitted_its_saved_up_quota_and_its_rate() -> None:
    times = list(at_random(10.0, 20.0, 1))
    counts = [len(metered(times, saved_up)) for saved_up in (0, 5, 60)]
    assert 18 <= counts[0] <= 20 and 23 <= counts[1] <= 25 and 78 <= counts[2] <= 80


def test_more_load_of_another_tenant_does_not_shorten_ttft() -> None:
    own = [0.5 + number for number in range(10)]
    alone, crowded = own_ttfts(own, [], 0), own_ttfts(own, [0.4 + number / 20 for number in range(200)], 0)
    assert len(alone) == len(crowded) == 10 and sum(alone) < sum(crowded) / 2
