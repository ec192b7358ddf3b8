"""The rate at which KV has been transferred lately."""

from __future__ import annotations

import pytest

from tailrace.perf.transfer_rate import TransferRate


def test_nothing_is_known_of_no_transfer() -> None:
    rate = TransferRate()
    rate.add(0, 1.0)
    rate.add(100, 0.0)
    assert rate.bytes_per_s is None


def test_large_transfers_tell_of_the_link_and_small_ones_of_latency() -> None:
    rate = TransferRate()
    for _ in range(30):
        rate.add(100_000_000, 0.1)
        rate.add(1_000, 0.002)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.03)


def test_a_link_that_has_become_slower_is_noticed() -> None:
    rate = TransferRate()
    for _ in range(100):
        rate.add(1_000_000, 0.001)
    for _ in range(60):
        rate.add(1_000_000, 0.01)
    assert rate.bytes_per_s == pytest.approx(1e8, rel=0.1)
