"""What is decided counts at once: the next decision, of the same report even, goes by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from scheduler_svc.actuator import Actuator
from scheduler_svc.copies import Copier
from scheduler_svc.decisions import Decider, Traceparents
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.migrations import Migrations, MigrationStarter, Negotiator, Recaller
from scheduler_svc.settings import Settings
from tailrace.actions import Action, HandBack, Migrate, SetPool
from tailrace.cluster import ClusterView, Pool, RequestView, Stage
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.runner import ActivePolicy, GuardedCalls
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.records import PolicyRecord
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tests.scheduler.conftest import connect
from tests.scheduler.facts import PREFILL, REASONING, Members, event, instance, request, steady

WAIT_S = 20.0


class Decides(LeastLoaded):
    """Flips the first prefill instance, and sends requests to where the fewest are on their way."""

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
    """The half of a scheduler that decides and acts, on a real etcd; no migration service is there."""

    store: Store
    membership: Membership
    state: ReportedCluster
    actuator: Actuator
    decider: Decider

    @property
    def pools(self) -> list[Pool | None]:
        """As policies see them."""
        return [instance.pool for instance in self.state.view().instances.values()]

    @property
    def coming(self) -> list[int]:
        """Open migrations to each instance."""
        return [instance.migrations_in for instance in self.state.view().instances.values()]

    async def ended(self) -> None:
        """Until all that was submitted is over."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.actuator._tasks)

    async def pool_in_etcd(self, name: str, pool: Pool) -> None:
        """Until the watch tells of it."""
        changed = asyncio.Event()
        self.membership.add_listener(changed.set)
        async with asyncio.timeout(WAIT_S):
            while self.membership.pools.get(name) is not pool:
                await changed.wait()
                changed.clear()


def told(pools: dict[str, Pool]) -> Members:
    """Instances a, b and c in these pools, as etcd has them."""
    return Members(instances={name: instance(name) for name in "abc"}, pools=pools)


@pytest.fixture
async def scheduler(etcd: str, cluster: str) -> AsyncIterator[Scheduler]:
    """Three prefill instances, two requests that a prefills."""
    async with contextlib.AsyncExitStack() as stack:
        store, membership, channels = await connect(stack, etcd, cluster)
        for name in "abc":
            await store.put(f"pools/{name}", b"prefill")
        state, active, leading = (
            ReportedCluster(),
            ActivePolicy(PolicyRecord(name="least_loaded")),
            asyncio.Event(),
        )
        active.policy = Decides()
        leading.set()
        metrics, traceparents = SchedulerMetrics(CollectorRegistry()), Traceparents()
        mover = MigrationStarter(state, Migrations(membership, channels), traceparents)
        negotiator = Negotiator(state, channels, traceparents)
        recaller = Recaller(state, channels)
        actuator = Actuator(
            state, mover, negotiator, recaller, Copier(state, channels), Settings(store), metrics
        )
        stack.push_async_callback(actuator.close)
        state.set_members(told(dict.fromkeys("abc", Pool.PREFILL)), 0.0)
        state.apply(steady("a", [request("r", PREFILL), request("q", PREFILL)]), 1.0)
        control = LiveControl(state, active, actuator, GuardedCalls(metrics))
        decider = Decider(control, leading)
        yield Scheduler(store, membership, state, actuator, decider)


async def test_two_prefills_that_end_at_once_flip_one_instance_and_go_two_ways(scheduler: Scheduler) -> None:
    both = event("a", "r", REASONING)
    both.phase_events.extend(event("a", "q", REASONING).phase_events)
    scheduler.decider.handle_report(both, 2.0)
    # Neither etcd nor anybody else has been heard of.
    assert scheduler.pools == [Pool.DECODE, Pool.PREFILL, Pool.PREFILL]
    assert scheduler.coming == [0, 1, 1]
    await scheduler.ended()
    assert await scheduler.store.get("pools/a") == b"decode"
    assert await scheduler.store.get("pools/b") == b"prefill"
    # Nobody carried the migrations out: the room is free again.
    assert scheduler.coming == [0, 0, 0]


async def test_two_that_outgrow_a_stage_in_one_report_go_two_ways(scheduler: Scheduler) -> None:
    members = told(dict.fromkeys("abc", Pool.PREFILL))
    members.stages = (Stage(0, 50, ("a",)), Stage(50, 1_000, ("b", "c")))
    scheduler.state.set_members(members, 1.5)
    scheduler.decider.handle_report(steady("a", [request("r"), request("q")]), 2.0)
    assert scheduler.coming == [0, 1, 1]
    await scheduler.ended()


async def test_an_order_counts_until_etcd_tells_of_the_pool(scheduler: Scheduler) -> None:
    scheduler.actuator.submit([SetPool("b", Pool.DECODE)], "test")
    await scheduler.ended()
    # What etcd tells of something else meanwhile may be older than the order.
    scheduler.state.set_members(told(dict.fromkeys("abc", Pool.PREFILL)), 2.0)
    assert scheduler.pools == [Pool.PREFILL, Pool.DECODE, Pool.PREFILL]
    await scheduler.pool_in_etcd("b", Pool.DECODE)
    scheduler.state.set_members(told({"a": Pool.PREFILL, "b": Pool.DECODE, "c": Pool.PREFILL}), 3.0)
    # From then on an operator's word is the last.
    scheduler.state.set_members(told(dict.fromkeys("abc", Pool.PREFILL)), 4.0)
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.PREFILL]


async def test_a_mistake_in_one_action_does_not_keep_the_next_from_being_done(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(request_id: str) -> RequestView | None:
        raise RuntimeError(f"a mistake about {request_id}")

    monkeypatch.setattr(scheduler.state, "request", mistaken)
    scheduler.actuator.submit([Migrate("r", "a", "b", "test"), SetPool("b", Pool.DECODE)], "test")
    assert scheduler.pools == [Pool.PREFILL, Pool.DECODE, Pool.PREFILL]
    await scheduler.ended()


async def test_one_order_an_instance_at_a_time(scheduler: Scheduler) -> None:
    scheduler.actuator.submit([SetPool("b", Pool.PREFILL_TO_DECODE), SetPool("b", Pool.DECODE)], "test")
    await scheduler.ended()
    # The second was dropped: the policy sees the instance again a moment later.
    assert await scheduler.store.get("pools/b") == b"prefill_to_decode"
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL_TO_DECODE, Pool.PREFILL]


async def test_an_order_that_somebody_was_before_counts_no_longer(scheduler: Scheduler) -> None:
    await scheduler.store.put("pools/c", b"decode_to_prefill")
    scheduler.actuator.submit([SetPool("c", Pool.DECODE)], "test")
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.DECODE]
    await scheduler.ended()
    assert await scheduler.store.get("pools/c") == b"decode_to_prefill"
    assert scheduler.pools == [Pool.PREFILL, Pool.PREFILL, Pool.PREFILL]


async def test_prompts_are_handed_back_by_their_instance(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    async def recall(recaller: Recaller, instance_id: str, request_ids: tuple[str, ...]) -> int:
        asked.append((instance_id, request_ids))
        return len(request_ids)

    monkeypatch.setattr(Recaller, "recall", recall)
    scheduler.actuator.submit([HandBack("a", ("r", "q")), HandBack("b", ())], "test")
    await scheduler.ended()
    assert asked == [("a", ("r", "q")), ("b", ())]
