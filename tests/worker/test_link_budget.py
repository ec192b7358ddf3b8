"""Background transfers use at most their share of the link's time."""

from __future__ import annotations

import pytest

from tailrace.handover import BACKGROUND, URGENT, label
from worker_agent.migration.copying import LinkBudget


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def time(self) -> float:
        return self.now_s


def transfer(budget: LinkBudget, clock: Clock, seconds: float) -> None:
    """Make a transfer of this duration."""
    with budget.transfer():
        clock.now_s += seconds


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_share_holds_over_time(share: float) -> None:
    clock = Clock()
    budget, busy_s, began_s = LinkBudget(share, clock.time), 0.0, clock.now_s
    for _ in range(200):
        clock.now_s += budget.wait_s()
        transfer(budget, clock, 0.05)
        busy_s += 0.05
    assert busy_s / (clock.now_s - began_s) == pytest.approx(share, rel=0.05)


def test_concurrent_transfers_are_charged_once() -> None:
    together, alone = Clock(), Clock()
    budget = LinkBudget(0.5, together.time)
    with budget.transfer(), budget.transfer():
        together.now_s += 0.5
    other = LinkBudget(0.5, alone.time)
    transfer(other, alone, 0.5)
    assert budget.wait_s() == pytest.approx(other.wait_s()) != 0.0


def test_small_transfer_does_not_wait_and_credit_is_limited() -> None:
    clock = Clock()
    budget = LinkBudget(0.5, clock.time)
    clock.now_s += 3600.0
    assert budget.wait_s() == 0.0
    transfer(budget, clock, 1.0)
    # 0.1 s of credit, 1 s used, half of it regained meanwhile.
    assert budget.wait_s() == pytest.approx(0.8)


def test_share_of_one_is_unlimited() -> None:
    clock = Clock()
    budget = LinkBudget(1.0, clock.time)
    transfer(budget, clock, 10.0)
    assert budget.wait_s() == 0.0
    with pytest.raises(ValueError, match="share"):
        LinkBudget(0.0)


def test_unknown_labels_become_other() -> None:
    assert label("rescheduling") == "rescheduling" and label("because I say so") == "other"
    assert not BACKGROUND & URGENT
