"""Leadership ends by the clock."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.store import election
from tailrace.store.election import Leadership, lease_clock


async def test_leadership_ends_by_the_clock_without_being_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was suspended longer than its lease must not act as leader when it resumes."""
    leading = Leadership()
    leading.hold_until(lease_clock() + 3_600)
    assert leading.is_set()
    suspended_s = 7_200.0
    monkeypatch.setattr(election, "lease_clock", lambda: lease_clock() + suspended_s)
    assert not leading.is_set()
    waiting = asyncio.create_task(leading.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    leading.hold_until(lease_clock() + suspended_s + 3_600)
    assert await waiting


async def test_leadership_can_be_cleared() -> None:
    leading = Leadership()
    assert not leading.is_set()
    leading.hold_until(lease_clock() + 3_600)
    leading.clear()
    assert not leading.is_set()
