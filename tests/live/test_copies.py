"""A document that only a busy instance holds is copied to another one, and found there."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tailrace.v1 import admin_pb2
from tests.harness.tries import RequestEnded, before_they_end
from tests.live.conftest import ENGINE
from tests.live.fleet import Fleet, open_fleet
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

BLOCK = 16
DOCUMENT = [32 + number % 64 for number in range(60 * BLOCK)]
COPIES = "tailrace_worker_prefix_copies_total"
FOUND = "tailrace_worker_cached_prompt_tokens_total"


async def drain(fleet: Fleet, name: str, undrain: bool = False) -> None:
    """Drain or undrain an instance and wait until it takes effect."""
    request = admin_pb2.DrainRequest(instance_id=name, undrain=undrain)
    call = fleet.admin.Drain(request, timeout=WAIT_S)
    await fleet.wait_for_members(lambda members: (name in members.draining) is not undrain)
    call.cancel()


async def wait_for_known_blocks(fleet: Fleet, name: str, blocks: int) -> None:
    """Wait until the scheduler knows of at least `blocks` cached blocks on the instance."""
    async with asyncio.timeout(WAIT_S):
        # The admin API has no notification of changes.
        while (await fleet.instances())[name].cached_blocks < blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_hot_document_is_copied_and_found(etcd: str, cluster: str, tmp_path: Path) -> None:
    numbers = itertools.count()

    async def copied() -> None:
        number = next(numbers)
        folder = tmp_path / str(number)
        folder.mkdir()
        await _copied_and_found(etcd, f"{cluster}-{number}", folder)

    await before_they_end(copied)


async def _copied_and_found(etcd: str, cluster: str, folder: Path) -> None:
    """Raise RequestEnded if the holder's load has ended before the document was copied."""
    engine = {**ENGINE, "prefix_caching": True, "kv_blocks": 1024}
    async with open_fleet(etcd, cluster, folder, 2, engine) as fleet:
        # No migration is worthwhile with this margin.
        await fleet.set_policy("tailrace", copy_ahead="true", pull_margin="0", margin="1e12")
        holder, other = fleet.names
        await drain(fleet, other)
        # One of two requests with the document finishes at once: its blocks are unused and can be copied.
        reader = await fleet.send(20, 0, 1_500, DOCUMENT)
        await fleet.wait_for_tokens(reader)
        await fleet.finish(await fleet.send(20, 0, 1, DOCUMENT))
        others = [await fleet.send(40, 0, 1_500) for _ in range(8)]
        await wait_for_known_blocks(fleet, holder, 60)
        await drain(fleet, other, undrain=True)
        async with asyncio.timeout(WAIT_S):
            while True:
                over = not fleet.running(reader, *others)
                if await fleet.read_metric(COPIES, outcome="pulled"):
                    break
                if over:
                    raise RequestEnded("the document was not copied")
                await asyncio.sleep(0.05)
        await wait_for_known_blocks(fleet, other, 60)
        assert not await fleet.read_metric(FOUND)
        # The next request need not compute the document there.
        await drain(fleet, holder)
        await fleet.finish(await fleet.send(20, 0, 5, DOCUMENT))
        assert await fleet.read_metric(FOUND) == len(DOCUMENT)
        assert not await fleet.read_metric("tailrace_worker_pulls_total", outcome="pulled")
        await fleet.finish(reader, *others)
