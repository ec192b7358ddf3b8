"""The recent transfer rate of KV."""

from __future__ import annotations

import pytest

from tailrace.perf.transfer_rate import TransferRate


def test_without_a_transfer_the_rate_is_unknown() -> None:
    rate = TransferRate()
    rate.add(0, 1.0)
    rate.add(100, 0.0)
    assert rate.bytes_per_s is None


def test_the_rate_is_dominated_by_large_transfers() -> None:
    rate = TransferRate()
    for _ in range(30):
        rate.add(100_000_000, 0.1)
        rate.add(1_000, 0.002)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.03)


def test_a_slower_link_is_detected() -> None:
    rate = TransferRate()
    for _ in range(100):
        rate.add(1_000_000, 0.001)
    for _ in range(60):
        rate.add(1_000_000, 0.01)
    assert rate.bytes_per_s == pytest.approx(1e8, rel=0.1)
