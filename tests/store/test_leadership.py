"""Who leads, by the clock."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.store import leadership
from tailrace.store.leadership import Leadership, lease_clock


async def test_it_ends_by_the_clock_before_anybody_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still longer than its lease must not act on it when it goes on."""
    leading = Leadership()
    leading.hold_until(lease_clock() + 4)
    assert leading.is_set()
    stood_still_s = 60.0
    monkeypatch.setattr(leadership, "lease_clock", lambda: lease_clock() + stood_still_s)
    assert not leading.is_set()
    waiting = asyncio.create_task(leading.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    leading.hold_until(lease_clock() + stood_still_s + 4)
    assert await waiting


async def test_it_can_be_cleared() -> None:
    leading = Leadership()
    assert not leading.is_set()
    leading.hold_until(lease_clock() + 60)
    leading.clear()
    assert not leading.is_set()
