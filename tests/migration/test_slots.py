"""Slots of migrations: limits, order and bounds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migration_svc.slots import MigrationSlots, NotAdmitted
from tests.waiting import WAIT_S


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def hold(slots: MigrationSlots, request_id: str, source: str, target: str, end: asyncio.Event) -> None:
    async with slots.hold(request_id, source, target):
        await end.wait()


async def test_migrations_per_direction_are_limited() -> None:
    slots, end = MigrationSlots(limit=2), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, f"r{n}", "a", "b", end)) for n in range(3)]
    await settle()
    assert slots.waiting == 1
    # The reverse direction and other pairs are not limited by this.
    async with slots.hold("back", "b", "a"), slots.hold("other", "c", "d"):
        assert slots.waiting == 1
    end.set()
    await asyncio.gather(*tasks)
    assert slots.waiting == 0


async def test_request_has_at_most_one_migration() -> None:
    slots = MigrationSlots()
    async with slots.hold("r", "a", "b"):
        with pytest.raises(NotAdmitted, match="already being migrated"):
            async with slots.hold("r", "a", "c"):
                pass
    async with slots.hold("r", "b", "c"):
        pass


async def test_wait_for_admission_times_out() -> None:
    slots = MigrationSlots(limit=1, max_wait_s=0.01)
    async with slots.hold("r1", "a", "b"):
        with pytest.raises(NotAdmitted, match="a or b had 1 migrations open"):
            async with slots.hold("r2", "a", "b"):
                pass
    async with slots.hold("r2", "a", "b"):
        pass


async def test_queue_is_bounded() -> None:
    slots, end = MigrationSlots(limit=1, queue_limit=1), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, f"r{n}", "a", "b", end)) for n in range(2)]
    await settle()
    with pytest.raises(NotAdmitted, match="already waiting"):
        async with slots.hold("r9", "a", "b"):
            pass
    end.set()
    await asyncio.gather(*tasks)


async def test_migrations_that_wait_for_a_hot_instance_refuse_none_between_others() -> None:
    slots, end = MigrationSlots(limit=1, queue_limit=4), asyncio.Event()
    hot = [asyncio.create_task(hold(slots, f"t{n}", f"s{n}", "hot", end)) for n in range(5)]
    leaving = [asyncio.create_task(hold(slots, f"s{n}", "full", f"t{n}", end)) for n in range(5)]
    await settle()
    assert slots.waiting == 8
    for source, target in (("other", "hot"), ("full", "other")):
        with pytest.raises(NotAdmitted, match=r"4 migrations are already waiting for (hot|full)"):
            async with slots.hold("r9", source, target):
                pass
    # Idle instances, and ones for which few wait.
    async with slots.hold("idle", "a", "b"):
        waits = asyncio.create_task(hold(slots, "waits", "a", "b", end))
        await settle()
        assert slots.waiting == 9
    end.set()
    await asyncio.gather(*hot, *leaving, waits)
    assert slots.waiting == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=25))
def test_limit_holds_and_no_slot_is_lost(moves: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        slots = MigrationSlots(limit=2, queue_limit=1000, max_wait_s=1000)
        open_now: list[tuple[int, int]] = []
        ends: list[tuple[asyncio.Task[None], asyncio.Event]] = []

        async def hold_slot(name: str, source: int, target: int, end: asyncio.Event) -> None:
            async with slots.hold(name, f"s{source}", f"t{target}"):
                open_now.append((source, target))
                assert sum(s == source for s, _ in open_now) <= 2
                assert sum(t == target for _, t in open_now) <= 2
                try:
                    await end.wait()
                finally:
                    open_now.remove((source, target))

        for number, (source, target, cancel_one) in enumerate(moves):
            end = asyncio.Event()
            ends.append((asyncio.create_task(hold_slot(f"r{number}", source, target, end)), end))
            await settle()
            if cancel_one:
                task, end = ends.pop(0)
                if number % 2:
                    task.cancel()
                else:
                    end.set()
                await settle()
        for _, end in ends:
            end.set()
        for task, _ in ends:
            async with asyncio.timeout(WAIT_S):
                await task
        assert slots.waiting == 0 and not open_now
        # Every slot is free again.
        async with contextlib.AsyncExitStack() as stack:
            for number in range(2):
                await stack.enter_async_context(slots.hold(f"again{number}", "s0", "t0"))

    asyncio.run(run())
