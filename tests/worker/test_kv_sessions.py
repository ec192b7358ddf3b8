"""Which blocks of an export a target may read."""

from __future__ import annotations

import pytest

from worker_agent.kv.address import KvTransferError
from worker_agent.kv.server import KvSession

NAMES = [bytes([number]) * 32 for number in range(4)]


async def test_blocks_are_readable_once_announced() -> None:
    session = KvSession("request")
    await session.announce(0, NAMES[:2])
    assert session.may_read(1, 1)
    assert not session.may_read(1, 2)
    await session.announce(2, NAMES[2:])
    assert session.hashes(1, 3) == NAMES[1:]


async def test_blocks_not_computed_yet_are_named_later() -> None:
    session = KvSession("request")
    await session.announce(0, NAMES[:3])
    await session.announce(2, NAMES[3:])
    assert session.hashes(0, 4) == [*NAMES[:2], NAMES[3]]


async def test_announcement_with_a_gap_is_refused() -> None:
    session = KvSession("request")
    await session.announce(0, NAMES[:1])
    with pytest.raises(KvTransferError, match="block 2 announced after 1 blocks"):
        await session.announce(2, NAMES[2:])
