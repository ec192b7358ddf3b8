"""Both ends of the migration protocol under random failures: one owner in the end, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tailrace.v1 import worker_pb2
from tests.worker.memory_fleet import ENGINE, MODES, Fleet
from tests.worker.virtual_loop import run_virtually
from worker_agent.engine.simulated import SimulatedSettings

NODE = st.integers(0, 2)
ACTION = st.one_of(
    st.tuples(st.just("migrate"), NODE, st.sampled_from(MODES)),
    st.tuples(st.just("migrate"), NODE, st.sampled_from(MODES)),
    st.tuples(st.just("queue"), NODE, st.sampled_from(MODES)),
    st.tuples(st.just("crowd"), NODE),
    st.tuples(st.just("cancel"), NODE),
    st.tuples(st.just("break exports"), NODE),
    st.tuples(st.just("reattach"), NODE),
    st.tuples(st.just("restart"), NODE),
    st.tuples(st.just("refuse")),
    st.tuples(st.just("mute")),
    st.tuples(st.just("damage"), NODE, st.integers(0, 10)),
    st.tuples(st.just("abort")),
)
POINTS = [
    *("import:open", "import:pre_copy", "import:paused", "import:adopt", "import:adopted"),
    *("export:open", "export:pre_copy", "export:paused", "export:adopt"),
]
# Something that happens between two steps of a migration.
ACTION = st.one_of(ACTION, ACTION, st.tuples(st.just("at"), st.sampled_from(POINTS), ACTION))
# Engines that are incompatible with the others, so that requests move between them by replay.
ALIKE: Mapping[int, SimulatedSettings] = {}
OTHER_BLOCKS = replace(ENGINE, block_tokens=8, kv_blocks=32)
NO_KV = replace(ENGINE, replay_reason="a test")
# Seconds before the action: some coincide with messages of another action, some follow them.
SCRIPT = st.lists(st.tuples(st.sampled_from((0.0, 0.001, 0.01, 0.05, 0.3, 1.0)), ACTION), max_size=14)


async def act(fleet: Fleet, action: tuple[object, ...]) -> None:
    match action:
        case ("migrate", int(node), mode):
            fleet.migrate(node, mode)  # type: ignore[arg-type]
        case ("queue", int(node), mode):
            fleet.migrate(node, mode, room_wait_s=5.0)  # type: ignore[arg-type]
        case ("crowd", int(node)):
            fleet.crowd(node)
        case ("cancel", int(node)):
            await fleet.cancel(node)
        case ("break exports", int(node)):
            fleet.break_exports(node)
        case ("reattach", int(node)):
            await fleet.reattach(node)
        case ("restart", int(node)):
            await fleet.restart(node)
        case ("refuse",):
            fleet.front_end.refuse_next = True
        case ("mute",):
            fleet.front_end.mute_next_query = True
        case ("damage", int(node), int(block)):
            fleet.nodes[node].engine.faults.flip_bit_in_block = block
        case ("abort",):
            fleet.front_end.abort()
        case ("at", str(point), tuple(later)):
            fleet.arm(point, lambda: act(fleet, later))


async def play(
    seed: int,
    script: Sequence[tuple[float, tuple[object, ...]]],
    engines: Mapping[int, SimulatedSettings] = ALIKE,
) -> tuple[list[int], int]:
    """Run the script; return the user's tokens and the number of committed migrations."""
    fleet = Fleet(seed, engines)
    await fleet.start()
    for wait_s, action in script:
        await asyncio.sleep(wait_s)
        await act(fleet, action)
    await fleet.settle()
    tokens, commits = fleet.front_end.tokens, fleet.commits
    await fleet.close()
    return tokens, commits


@cache
def undisturbed() -> list[int]:
    tokens, _ = run_virtually(play(0, []))
    assert len(tokens) == 60
    return tokens


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    script=SCRIPT,
    engines=st.dictionaries(NODE, st.sampled_from((OTHER_BLOCKS, NO_KV)), max_size=2),
)
# A submission during the last step of an import of the same request.
@example(
    seed=74,
    script=[(0.3, ("migrate", 1, MODES[0])), (0.0, ("migrate", 2, MODES[0])), (0.01, ("reattach", 0))],
    engines=ALIKE,
)
def test_stream_is_complete_and_nothing_is_left_after_any_failure(
    seed: int,
    script: Sequence[tuple[float, tuple[object, ...]]],
    engines: Mapping[int, SimulatedSettings],
) -> None:
    tokens, _ = run_virtually(play(seed, script, engines))
    if any(("abort",) in (action, action[-1]) for _, action in script):
        assert tokens == undisturbed()[: len(tokens)]
    else:
        assert tokens == undisturbed()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_without_failures_every_migration_is_committed(seed: int) -> None:
    script = [(0.6, ("migrate", target, MODES[target % 2])) for target in (1, 2, 0)]
    tokens, commits = run_virtually(play(seed, script))
    assert tokens == undisturbed()
    assert commits >= 1


@pytest.mark.parametrize("engines", [{1: OTHER_BLOCKS}, {0: NO_KV}, {1: NO_KV, 2: OTHER_BLOCKS}])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_migrations_between_incompatible_workers_are_replays(
    seed: int, engines: Mapping[int, SimulatedSettings]
) -> None:
    script = [(0.6, ("migrate", target, MODES[0])) for target in (1, 2, 0)]
    tokens, commits = run_virtually(play(seed, script, engines))
    assert tokens == undisturbed()
    assert commits >= 1


def test_worker_with_another_model_takes_over_no_request() -> None:
    """The migration is refused before anything is copied, and the source continues."""
    other = replace(ENGINE, weights_seed=1)
    tokens, commits = run_virtually(play(0, [(0.6, ("migrate", 1, MODES[0]))], {1: other}))
    assert (tokens, commits) == (undisturbed(), 0)


def test_worker_measures_its_incoming_transfer_rate() -> None:
    async def moved() -> list[bool]:
        fleet = Fleet(0)
        await fleet.start()
        await asyncio.sleep(0.6)
        fleet.migrate(1, MODES[0])
        await asyncio.sleep(0.6)
        await fleet.settle()
        known = [node.incoming.bytes_per_s is not None for node in fleet.nodes]
        assert fleet.commits == 1
        await fleet.close()
        return known

    assert run_virtually(moved()) == [False, True, False]


@pytest.mark.parametrize(("action", "commits"), [("migrate", 0), ("queue", 1)])
def test_migration_to_a_full_target_waits_for_room_if_requested(action: str, commits: int) -> None:
    """Meanwhile the request continues to decode at its source."""
    script = [(0.3, ("crowd", 1)), (0.2, (action, 1, MODES[0]))]
    tokens, committed = run_virtually(play(3, script))
    assert tokens == undisturbed()
    assert committed == commits


@pytest.mark.parametrize(
    ("point", "commits"), [("import:adopt", 0), ("import:adopted", 1), ("import_activate", 1)]
)
def test_error_at_the_target_never_leaves_the_stream_hanging(point: str, commits: int) -> None:
    """Before the adoption is requested the source continues; after its commit the front end recovers."""

    async def moved() -> tuple[list[int], int]:
        fleet = Fleet(0)
        await fleet.start()
        node = fleet.nodes[1]
        with pytest.MonkeyPatch.context() as patch:

            async def fail(where: str) -> None:
                if where == point:
                    raise ZeroDivisionError("a mistake")

            patch.setattr(node.faults, "hold", fail)
            if point == "import_activate":
                patch.setattr(node.engine, point, lambda request_id: fail(point))
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            await fleet.settle()
        tokens, committed = fleet.front_end.tokens, fleet.commits
        await fleet.close()
        return tokens, committed

    assert run_virtually(moved()) == (undisturbed(), commits)


@pytest.mark.parametrize("engines", [ALIKE, {1: OTHER_BLOCKS}], ids=["live", "replay"])
def test_a_front_end_that_leaves_after_its_acceptance_leaves_nothing_behind(
    engines: Mapping[int, SimulatedSettings],
) -> None:
    """It recovers the request by itself: what the target ran besides, nobody would abort."""

    async def moved() -> list[int]:
        fleet = Fleet(0, engines)
        await fleet.start()

        async def leave(where: str) -> None:
            if where == "import:adopted":
                await fleet.reattach(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet.nodes[1].faults, "hold", leave)
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            # This checks that nothing is left anywhere.
            await fleet.settle()
        tokens = fleet.front_end.tokens
        await fleet.close()
        return tokens

    assert run_virtually(moved()) == undisturbed()


@pytest.mark.parametrize("action", ["reattach", "restart"])
def test_a_request_that_comes_back_while_its_export_ends_is_in_the_workers_table(action: str) -> None:
    """The target is lost just after its commit: the worker must know what it runs, or it stops as empty."""

    async def moved() -> tuple[list[int], int, int]:
        fleet = Fleet(0)
        await fleet.start()
        source = fleet.nodes[0]

        async def lose_target(where: str) -> None:
            if where == "export:adopt":
                await act(fleet, (action, 1))
                await asyncio.sleep(0.3)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source.faults, "hold", lose_target)
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            await asyncio.sleep(1.5)
        known = len(source.running)
        await fleet.settle()
        tokens, finished = fleet.front_end.tokens, source.metrics.finished["finished"]
        await fleet.close()
        return tokens, known, finished

    assert run_virtually(moved()) == (undisturbed(), 1, 1)


def test_a_release_during_the_end_of_an_export_is_no_abort() -> None:
    """The target's report of the commit has come before it; the scheduler learns where the request is."""

    async def moved() -> tuple[dict[str, int], list[str]]:
        fleet = Fleet(0)
        await fleet.start()
        source, front_end = fleet.nodes[0], fleet.front_end

        async def release(where: str) -> None:
            if where == "export:adopt":
                front_end.send(0, release=worker_pb2.Release(handle=1, epoch=0))
                await asyncio.sleep(0.3)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source.faults, "hold", release)
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            await fleet.settle()
        moved_to = [event.moved_to_instance_id for event in source.events.take([], source.running)]
        finished = dict(source.metrics.finished)
        await fleet.close()
        return finished, moved_to

    finished, moved_to = run_virtually(moved())
    assert (finished["moved"], finished["aborted"], moved_to) == (1, 0, ["1"])


def test_a_request_released_before_its_pause_is_not_in_the_workers_table() -> None:
    """An earlier migration of it was accepted after the source was told to go on."""

    async def moved() -> None:
        fleet = Fleet(0)
        await fleet.start()
        source, front_end = fleet.nodes[0], fleet.front_end

        async def release(where: str) -> None:
            if where == "export:pre_copy" and front_end.owner == 0:
                front_end.hand_over(2)
                await asyncio.sleep(0.3)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source.faults, "hold", release)
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            # This checks that nothing is left anywhere.
            await fleet.settle()
        await fleet.close()

    run_virtually(moved())


@pytest.mark.parametrize("engines", [ALIKE, {1: OTHER_BLOCKS}], ids=["live", "replay"])
def test_an_abort_between_acceptance_and_start_is_not_lost(engines: Mapping[int, SimulatedSettings]) -> None:
    async def moved() -> int:
        fleet = Fleet(0, engines)
        await fleet.start()
        target = fleet.nodes[1]

        async def abort(where: str) -> None:
            if where == "import:adopted":
                fleet.front_end.abort()
                await asyncio.sleep(0.3)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target.faults, "hold", abort)
            await asyncio.sleep(0.6)
            fleet.migrate(1, MODES[0])
            await fleet.settle()
        finished = target.metrics.finished["finished"]
        await fleet.close()
        return finished

    assert run_virtually(moved()) == 0
