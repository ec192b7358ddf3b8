"""Transfers that nobody waits for leave the link free for its share of the time."""

from __future__ import annotations

import pytest

from tailrace.handover import BACKGROUND, URGENT, label
from worker_agent.migration.link_budget import LinkBudget


class Clock:
    """Goes on only as told."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def time(self) -> float:
        return self.now_s


def spent(budget: LinkBudget, clock: Clock, seconds: float) -> None:
    """One transfer."""
    with budget.transfer():
        clock.now_s += seconds


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_over_time_the_share_is_kept(share: float) -> None:
    clock = Clock()
    budget, busy_s, began_s = LinkBudget(share, clock), 0.0, clock.now_s
    for _ in range(200):
        clock.now_s += budget.wait_s()
        spent(budget, clock, 0.05)
        busy_s += 0.05
    assert busy_s / (clock.now_s - began_s) == pytest.approx(share, rel=0.05)


def test_two_at_once_spend_once() -> None:
    together, alone = Clock(), Clock()
    budget = LinkBudget(0.5, together)
    with budget.transfer(), budget.transfer():
        together.now_s += 0.5
    other = LinkBudget(0.5, alone)
    spent(other, alone, 0.5)
    assert budget.wait_s() == pytest.approx(other.wait_s()) != 0.0


def test_a_small_one_does_not_wait_and_idling_saves_little_up() -> None:
    clock = Clock()
    budget = LinkBudget(0.5, clock)
    clock.now_s += 3600.0
    assert budget.wait_s() == 0.0
    spent(budget, clock, 1.0)
    # 0.1 s saved up, 1 s spent, half of it come back meanwhile.
    assert budget.wait_s() == pytest.approx(0.8)


def test_all_of_the_link_is_no_limit() -> None:
    clock = Clock()
    budget = LinkBudget(1.0, clock)
    spent(budget, clock, 10.0)
    assert budget.wait_s() == 0.0
    with pytest.raises(ValueError, match="share"):
        LinkBudget(0.0)


def test_labels_are_few() -> None:
    assert label("rescheduling") == "rescheduling" and label("because I say so") == "other"
    assert not BACKGROUND & URGENT
