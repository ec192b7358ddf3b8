"""What an import holds is freed when it ends, not by the garbage collector.

An import holds the mapping of its source's KV, a connection, and buffers; a full collection is rare.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from tailrace.v1 import types_pb2, worker_pb2
from tests.counting import failures_of
from tests.garbage import only_counted
from tests.worker.memory_fleet import MODES, Fleet
from tests.worker.virtual_loop import run_virtually
from worker_agent.migration.target import Import

Break = Callable[[Fleet], object]
_POINTS = (
    "export:open",
    "export:pre_copy",
    "export:paused",
    "import:open",
    "import:pre_copy",
    "import:paused",
    "import:adopt",
)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Leave what earlier tests made out of the collections: with a million objects each takes long."""
    gc.collect()
    gc.freeze()


def cancel(fleet: Fleet) -> object:
    """As the migration service does."""
    return asyncio.ensure_future(fleet.cancel(1))


def cut(fleet: Fleet) -> None:
    """End the link between source and target."""
    fleet.break_exports(0)


def refuse(fleet: Fleet) -> None:
    """Have the source refuse: its request has ended."""
    fleet.front_end.abort()


def fail(fleet: Fleet) -> object:
    raise ZeroDivisionError("a mistake")


async def abort_each_step(point: str, end: Break) -> dict[str, int]:
    fleet = Fleet(0)
    await fleet.start()
    await asyncio.sleep(0.6)
    reached = 0
    # Which end had the mistake, if there is one; the other end gives up for a reason.
    loop = "imports" if point.startswith("import") else "exports"
    before = failures_of(loop)

    async def hold(at: str) -> None:
        nonlocal reached
        if at == point:
            reached += 1
            end(fleet)
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch, only_counted() as left:
        for node in fleet.nodes:
            patch.setattr(node.faults, "hold", hold)
        fleet.migrate(1, MODES[0])
        await asyncio.sleep(30)
        assert reached
        assert failures_of(loop) == before + (reached if end is fail else 0)
        assert not len(fleet.nodes[1].imports)
        # The fleet's own records of what is over.
        fleet.nodes[0].leases.clear()
    await fleet.settle()
    await fleet.close()
    return dict(left)


@pytest.mark.parametrize("end", [cancel, cut, refuse, fail])
@pytest.mark.parametrize("point", _POINTS)
def test_aborted_migration_leaves_nothing_to_collect(point: str, end: Break) -> None:
    assert run_virtually(abort_each_step(point, end)) == {}


def test_import_that_fails_after_its_commit_ended_as_committed() -> None:
    """The request is there, so its migration must not be journalled as aborted."""

    async def fail_late() -> worker_pb2.ImportEvent | None:
        fleet = Fleet(0)
        await fleet.start()
        await asyncio.sleep(0.6)
        before = failures_of("imports")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Import, "_phase", lambda self, opened: fail(fleet))
            fleet.migrate(1, MODES[0])
            await asyncio.sleep(10)
        assert failures_of("imports") == before + 1
        end = await fleet.nodes[1].imports.cancel("m1")
        await fleet.settle()
        await fleet.close()
        return end

    end = run_virtually(fail_late())
    assert end is not None and end.state == types_pb2.MIGRATION_STATE_COMMITTED


def test_source_that_refuses_leaves_nothing_to_collect() -> None:
    async def refused() -> dict[str, int]:
        fleet = Fleet(0)
        await fleet.start()
        await asyncio.sleep(0.6)
        with only_counted() as left:
            fleet.front_end.request_id, name = "another", fleet.front_end.request_id
            fleet.migrate(1, MODES[0])
            await asyncio.sleep(10)
            fleet.front_end.request_id = name
            fleet.nodes[0].leases.clear()
        await fleet.settle()
        await fleet.close()
        return dict(left)

    assert run_virtually(refused()) == {}


def test_committed_migration_leaves_nothing_to_collect() -> None:
    async def moved() -> dict[str, int]:
        fleet = Fleet(0)
        await fleet.start()
        await asyncio.sleep(0.6)
        with only_counted() as left:
            for target in (1, 2, 0):
                fleet.migrate(target, MODES[0])
                await asyncio.sleep(0.6)
            assert fleet.commits
            for node in fleet.nodes:
                node.leases.clear()
            fleet._tasks.clear()
        await fleet.settle()
        await fleet.close()
        return dict(left)

    assert run_virtually(moved()) == {}
