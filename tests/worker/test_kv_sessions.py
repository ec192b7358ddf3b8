"""Which blocks of an export a target may read, and how long it may be silent."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from tests.worker.virtual_loop import run_virtually
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.server import KvSession
from worker_agent.migration.export_call import Item, Lease
from worker_agent.migration.source import Export

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


def test_a_target_that_fetches_blocks_is_not_silent() -> None:
    """Such as one whose round of copying takes 100 s."""

    async def waited() -> tuple[Item | None, float]:
        clock = asyncio.get_running_loop()
        began_s = clock.time()
        export = Export(Mock(), Lease())
        export._session = session = KvSession("request")
        following = asyncio.create_task(export._next_item())
        for _ in range(10):
            await asyncio.sleep(10.0)
            session.requested()
        return await following, clock.time() - began_s

    assert run_virtually(waited()) == (None, 130.0)
