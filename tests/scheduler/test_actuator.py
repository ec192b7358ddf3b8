"""Decisions take effect immediately: the next decision, even on the same report, sees them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from scheduler_svc import actuator
from scheduler_svc.actuator import Actuator, WorkerCalls
from scheduler_svc.loop import DecisionLoop
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.migrations import Migrations, MigrationStarter
from scheduler_svc.settings import Settings
from tailrace.actions import ORDERED_MAX, Action, Migrate, ReturnPrompts, SetPool, WhenFull
from tailrace.cluster import ClusterView, Pool, RequestView, Stage
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.guard import PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import PoolOrder, ReportedCluster
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.records import PolicyRecord
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership
from tailrace.store.store import SWAPS_MAX, Store
from tests.counting import failures_of
from tests.scheduler.conftest import connect
from tests.scheduler.facts import (
    PREFILL,
    REASONING,
    event,
    instance,
    report_to,
    request,
    set_members,
    steady,
)
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class FlipAndSpread(LeastLoaded):
    """Flip the first prefill instance, and migrate to the instance with the fewest incoming migrations."""

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        target = min(("b", "c"), key=lambda name: view.instances[name].migrations_in)
        return (Migrate(request.request_id, request.instance_id, target, "test"),)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        others = [i for i in view.instances.values() if i.instance_id != request.instance_id]
        target = min(others, key=lambda i: (i.migrations_in, i.instance_id))
        flips = [i for i in view.instances.values() if i.pool is Pool.PREFILL and i is not others[-1]]
        decodes = any(i.pool is Pool.DECODE for i in view.instances.values())
        moved = Migrate(request.request_id, request.instance_id, target.instance_id, "test")
        return (moved,) if decodes else (SetPool(flips[0].instance_id, Pool.DECODE), moved)


@dataclass
class Scheduler:
    """The deciding and acting half of a scheduler, with a real etcd but no migration service."""

    store: Store
    membership: Membership
    state: ReportedCluster
    actuator: Actuator
    loop: DecisionLoop
    metrics: SchedulerMetrics

    @property
    def pools(self) -> list[Pool | None]:
        """Return the pools as policies see them."""
        return [instance.pool for instance in self.state.view().instances.values()]

    @property
    def incoming(self) -> list[int]:
        """Return the number of open migrations to each instance."""
        return [instance.migrations_in for instance in self.state.view().instances.values()]

    def count(self, outcome: str) -> float:
        """Return how many pool moves ended so."""
        return float(self.metrics.actions.labels("SetPool", outcome)._value.get())

    async def finish_actions(self) -> None:
        """Wait until all submitted actions are complete."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.actuator._tasks)

    async def wait_for_pool(self, name: str, pool: Pool) -> None:
        """Wait until the watch reports the pool."""
        changed = asyncio.Event()
        self.membership.add_listener(changed.set)
        async with asyncio.timeout(WAIT_S):
            while self.membership.pools.get(name) is not pool:
                await changed.wait()
                changed.clear()


def in_pools(pools: dict[str, Pool]) -> StaticMembers:
    """Return instances a, b and c in these pools, as in etcd."""
    return StaticMembers(instances={name: instance(name) for name in "abc"}, pools=pools)


@pytest.fixture
async def scheduler(etcd: str, cluster: str) -> AsyncIterator[Scheduler]:
    """Return a scheduler with three prefill instances; a prefills two requests."""
    async with contextlib.AsyncExitStack() as stack:
        store, membership, channels = await connect(stack, etcd, cluster)
        for name in "abc":
            await store.put(f"pools/{name}", b"prefill")
        state, active, leading = (
            ReportedCluster(),
            ActivePolicy(PolicyRecord(name="least_loaded")),
            asyncio.Event(),
        )
        active.policy = FlipAndSpread()
        leading.set()
        metrics = SchedulerMetrics(CollectorRegistry())
        mover = MigrationStarter(state, Migrations(membership, channels))
        workers = WorkerCalls(state, channels)
        actuator = Actuator(state, mover, workers, Settings(store), metrics)
        stack.push_async_callback(actuator.close)
        set_members(state, in_pools(dict.fromkeys("abc", Pool.PREFILL)), 0.0)
        report_to(state, steady("a", [request("r", PREFILL), request("q", PREFILL)]), 1.0)
        control = LiveControl(state, active, actuator, PolicyGuard(metrics))
        loop = DecisionLoop(control, leading, metrics)
        yield Scheduler(store, membership, state, actuator, loop, metrics)


async def test_two_prefills_that_end_together_flip_one_instance(
    scheduler: Scheduler,
) -> None:
    both = event("a", "r", REASONING)
    both.phase_events.extend(event("a", "q", REASONING).phase_events)
    scheduler.loop.handle_report(both, 2.0)
    # Nothing has been heard from etcd or other services yet.
    assert scheduler.pools == [Pool.DECODE, Pool.PREFILL, Pool.PREFILL]
    assert scheduler.incoming == [0, 1, 1]
    await scheduler.finish_actions()
    assert await scheduler.store.get("pools/a") == b"decode"
    assert await scheduler.store.get("pools/b") == b"prefill"
    # No migration was carried out: the room is free again.
    assert scheduler.incoming == [0, 0, 0]


async def test_two_requests_that_outgrow_a_stage_have_different_targets(
    scheduler: Scheduler,
) -> None:
    members = in_pools(dict.fromkeys("abc", Pool.PREFILL))
    members.stages = (Stage(0, 50, ("a",)), Stage(50, 1_000, ("b", "c")))
    set_members(scheduler.state, members, 1.5)
    scheduler.loop.handle_report(steady("a", [request("r"), request("q")]), 2.0)
    assert scheduler.incoming == [0, 1, 1]
    await scheduler.finish_actions()


async def test_an_ordered_pool_counts_until_etcd_reports_it(scheduler: Scheduler) -> None:
    scheduler.actuator.submit([SetPool("b", Pool.DECODE)], "test")
    await scheduler.finish_actions()
    # Other changes in etcd meanwhile can show a state older than the order.
    set_members(scheduler.state, in_pools(dict.fromkeys("abc", Pool.PREFILL)), 2.0)
    assert scheduler.pools == [Pool.PREFILL, Pool.DECODE, Pool.PREFILL]
    await scheduler.wait_for_pool("b", Pool.DECODE)
    set_members(scheduler.state, in_pools({"a": Pool.PREFILL, "b": Pool.DECODE, "c": Pool.PREFILL}), 3.0)
    # From then on, an operator's change takes precedence.
    set_members(scheduler.state, in_pools(dict.fromkeys("abc", Pool.PREFILL)), 4.0)
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.PREFILL]


async def test_an_error_in_one_action_does_not_stop_the_next(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(request_id: str) -> RequestView | None:
        raise RuntimeError(f"an error with {request_id}")

    async def swap_none(*_: object) -> None:
        raise RuntimeError("an error while it is carried out")

    before = failures_of("actions")
    monkeypatch.setattr(scheduler.state, "request", failing)
    scheduler.actuator.submit([Migrate("r", "a", "b", "test"), SetPool("b", Pool.DECODE)], "test")
    assert scheduler.pools == [Pool.PREFILL, Pool.DECODE, Pool.PREFILL]
    await scheduler.finish_actions()
    assert failures_of("actions") == before + 1
    with monkeypatch.context() as patch:
        patch.setattr(Settings, "swap_pools", swap_none)
        scheduler.actuator.submit([SetPool("c", Pool.DECODE)], "test")
        await scheduler.finish_actions()
    assert failures_of("actions") == before + 2
    assert (scheduler.count("done"), scheduler.count("failed")) == (1, 1)
    assert scheduler.pools[2] is Pool.PREFILL, "the order no longer counts"


async def test_one_order_per_instance_at_a_time(scheduler: Scheduler) -> None:
    scheduler.actuator.submit([SetPool("b", Pool.PREFILL_TO_DECODE), SetPool("b", Pool.DECODE)], "test")
    await scheduler.finish_actions()
    # The second was dropped: the policy decides about the instance again soon.
    assert await scheduler.store.get("pools/b") == b"prefill_to_decode"
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL_TO_DECODE, Pool.PREFILL]


async def test_an_order_that_lost_the_race_no_longer_counts(scheduler: Scheduler) -> None:
    await scheduler.store.put("pools/c", b"decode_to_prefill")
    scheduler.actuator.submit([SetPool("c", Pool.DECODE)], "test")
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.DECODE]
    await scheduler.finish_actions()
    assert await scheduler.store.get("pools/c") == b"decode_to_prefill"
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.PREFILL]


async def test_pool_moves_of_a_tick_are_few_changes_in_etcd(scheduler: Scheduler) -> None:
    names = [f"i{n}" for n in range(1_000)]
    set_members(scheduler.state, StaticMembers({name: instance(name) for name in names}), 2.0)
    scheduler.actuator.submit([SetPool(name, Pool.DECODE) for name in names], "test")
    assert scheduler.pools == [Pool.DECODE] * 1_000, "all of them count at once"
    await scheduler.finish_actions()
    # Keys that one change wrote have its revision. Others may use this etcd, too.
    revisions: set[int] = set()
    for first in range(0, len(names), SWAPS_MAX):
        some = [f"pools/{name}" for name in names[first : first + SWAPS_MAX]]
        found = await scheduler.store._read_all(some, "the pools")
        revisions.update(present.mod_revision for present in found.values() if present is not None)
    assert len(revisions) == 8
    written = await scheduler.store.get_prefix("pools/i")
    assert written == {f"pools/{name}": b"decode" for name in names}
    assert scheduler.count("done") == 1_000


async def test_of_pool_moves_decided_together_only_those_that_lost_a_race_are_refused(
    scheduler: Scheduler,
) -> None:
    await scheduler.store.put("pools/b", b"decode_to_prefill")
    scheduler.actuator.submit([SetPool(name, Pool.DECODE) for name in "abc"], "test")
    assert scheduler.pools == [Pool.DECODE, Pool.DECODE, Pool.DECODE]
    await scheduler.finish_actions()
    assert await scheduler.store.get_prefix("pools/") == {
        "pools/a": b"decode",
        "pools/b": b"decode_to_prefill",
        "pools/c": b"decode",
    }
    assert scheduler.pools == [Pool.DECODE, Pool.PREFILL, Pool.DECODE]
    assert (scheduler.count("done"), scheduler.count("refused")) == (2, 1)


async def test_pool_moves_of_a_large_fleet_are_written_a_few_at_a_time(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, most, names = 0, 0, [f"i{n}" for n in range(100)]

    async def swap_pools(settings: Settings, orders: Sequence[PoolOrder]) -> frozenset[str]:
        nonlocal writing, most
        writing += 1
        most = max(most, writing)
        await asyncio.sleep(0)
        writing -= 1
        return frozenset(order.instance_id for order in orders)

    monkeypatch.setattr(Settings, "swap_pools", swap_pools)
    set_members(scheduler.state, StaticMembers({name: instance(name) for name in names}), 2.0)
    for name in names:
        # As placements decide them.
        scheduler.actuator.submit([SetPool(name, Pool.DECODE)], "test")
    assert scheduler.pools == [Pool.DECODE] * 100, "all of them count at once"
    await scheduler.finish_actions()
    assert most <= 32 and scheduler.count("done") == 100


async def test_pool_moves_that_cannot_be_written_do_not_keep_other_actions_waiting(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, unavailable = [f"i{n}" for n in range(100)], asyncio.Event()

    async def swap_pools(*_: object) -> None:
        await unavailable.wait()
        raise StoreUnavailable("etcd did not answer in time")

    monkeypatch.setattr(Settings, "swap_pools", swap_pools)
    monkeypatch.setattr(actuator, "_POOL_TURN_S", 0.05)
    set_members(scheduler.state, StaticMembers({name: instance(name) for name in names}), 2.0)
    for name in names:
        scheduler.actuator.submit([SetPool(name, Pool.DECODE)], "test")
    async with asyncio.timeout(WAIT_S):
        while scheduler.pools.count(Pool.DECODE) > 32:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    unavailable.set()
    await scheduler.finish_actions()
    assert Pool.DECODE not in scheduler.pools, "none of the orders counts any more"
    assert scheduler.count("refused") == 100


async def test_between_the_actions_of_a_tick_the_loop_runs(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def return_prompts(workers: WorkerCalls, instance_id: str, request_ids: tuple[str, ...]) -> int:
        begun.append(request_ids[0])
        return 1

    monkeypatch.setattr(WorkerCalls, "return_prompts", return_prompts)
    names = [f"r{n}" for n in range(20)]
    scheduler.actuator.submit([ReturnPrompts("a", (name,)) for name in names], "test")
    rounds = [0]
    while scheduler.actuator._tasks:
        await asyncio.sleep(0)
        rounds.append(len(begun))
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(rounds))
    assert begun == names


async def test_instances_are_asked_to_hand_prompts_back(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[tuple[str, tuple[str, ...]]] = []

    async def return_prompts(workers: WorkerCalls, instance_id: str, request_ids: tuple[str, ...]) -> int:
        returned.append((instance_id, request_ids))
        return len(request_ids)

    monkeypatch.setattr(WorkerCalls, "return_prompts", return_prompts)
    scheduler.actuator.submit([ReturnPrompts("a", ("r", "q")), ReturnPrompts("b", ())], "test")
    await scheduler.finish_actions()
    assert returned == [("a", ("r", "q")), ("b", ())]


async def test_a_migration_that_could_only_wait_is_refused_at_once_unless_the_policy_waits(
    scheduler: Scheduler,
) -> None:
    several = [request(f"r{n}", REASONING) for n in range(2 * ORDERED_MAX + 2)]
    report_to(scheduler.state, steady("a", several), 2.0)
    moves = [Migrate(each.request_id, "a", "b", "test") for each in several]
    for when_full in (WhenFull.REFUSE, WhenFull.HOST):
        scheduler.actuator.submit(moves[: ORDERED_MAX + 1], "test", when_full)
        assert scheduler.incoming == [0, ORDERED_MAX, 0]
    scheduler.actuator.submit(moves[ORDERED_MAX + 1 :], "test", WhenFull.WAIT)
    assert scheduler.incoming == [0, len(moves) - 1, 0]
    await scheduler.finish_actions()
