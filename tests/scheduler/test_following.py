"""Which policy is in force, whatever the order of this scheduler's writes and of etcd's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import cast

import pytest

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.following import Following
from scheduler_svc.settings import Settings
from tailrace import plugins
from tailrace.actions import Action, WhenFull
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.guard import patient_guard
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.policy import registry
from tailrace.policy.deployment import Fact
from tailrace.policy.round_robin import RoundRobin
from tailrace.records import PolicyRecord, resumed, suspended
from tailrace.slo import Slo, changed_slo
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2

LEAST, ROBIN, ARROW = (PolicyRecord(name=name) for name in ("least_loaded", "round_robin", "arrow"))


class Etcd:
    """etcd, as far as its watch has shown it (`policy`, `slo`, `revision`), and as written."""

    def __init__(self) -> None:
        self.policy: PolicyRecord | None = None
        self.slo = Slo()
        self.revision = 10
        self.written: PolicyRecord | None = None
        self.written_slo = Slo()
        self.written_revision = 10
        self.down = False
        self.wrote = asyncio.Event()
        # Called when a write has been done and its reply has not arrived yet.
        self.meanwhile: Callable[[], None] = lambda: None

    def write(self, record: PolicyRecord) -> int:
        """Write as any scheduler does."""
        self.written = record
        self.written_revision += 1
        self.wrote.set()
        return self.written_revision

    def show(self) -> None:
        """Let the watch reach what is written."""
        self.policy, self.slo, self.revision = self.written, self.written_slo, self.written_revision

    async def set_policy(self, record: PolicyRecord) -> tuple[PolicyRecord | None, int]:
        previous, revision = self.written, self.write(record)
        self.meanwhile()
        return previous, revision

    async def suspend_policy(self, record: PolicyRecord, default: PolicyRecord) -> int:
        if self.down:
            raise StoreUnavailable("down")
        return self.write(record) if (self.written or default) == resumed(record) else 0

    async def change_slo(
        self, changes: Mapping[str, float], check: Callable[[Slo], None]
    ) -> tuple[Slo, Slo, int]:
        check(changed_slo(self.written_slo, changes))
        before, self.written_slo = self.written_slo, changed_slo(self.written_slo, changes)
        self.written_revision += 1
        after, revision = self.written_slo, self.written_revision
        self.meanwhile()
        return before, after, revision


class NoActions:
    """Nothing is decided here."""

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Do nothing."""


class Scheduler:
    """One scheduler's policy in force."""

    def __init__(self, etcd: Etcd) -> None:
        self.active = ActivePolicy(LEAST)
        guard = patient_guard()
        control = LiveControl(ReportedCluster(), self.active, NoActions(), guard)
        self.following = Following(control, cast(Membership, etcd), cast(Settings, etcd), guard)

    async def set_policy(self, record: PolicyRecord) -> None:
        await self.following.set_policy(admin_pb2.SetPolicyRequest(name=record.name))


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
def scheduler(etcd: Etcd) -> Scheduler:
    return Scheduler(etcd)


async def test_an_event_of_a_later_write_before_the_reply_is_not_undone(
    etcd: Etcd, scheduler: Scheduler
) -> None:
    def another_scheduler_writes() -> None:
        etcd.write(ARROW)
        etcd.show()
        scheduler.following.follow()

    etcd.meanwhile = another_scheduler_writes
    await scheduler.set_policy(ROBIN)
    assert scheduler.active.name == "arrow"


async def test_a_write_is_in_force_at_once_and_no_earlier_event_undoes_it(
    etcd: Etcd, scheduler: Scheduler
) -> None:
    await scheduler.set_policy(ROBIN)
    assert scheduler.active.name == "round_robin"
    # For instance a worker registers, and the watch is behind.
    scheduler.following.follow()
    assert scheduler.active.name == "round_robin"
    etcd.show()
    scheduler.following.follow()
    assert scheduler.active.name == "round_robin"
    etcd.write(ARROW)
    etcd.show()
    scheduler.following.follow()
    assert scheduler.active.name == "arrow"


async def test_slos_are_followed_by_revision_too(etcd: Etcd, scheduler: Scheduler) -> None:
    def another_scheduler_writes() -> None:
        etcd.written_slo = Slo(ttft_s=9.0)
        etcd.written_revision += 1
        etcd.show()
        scheduler.following.follow()

    await scheduler.following.change_slo({"ttft": 3.0})
    assert scheduler.active.slo.ttft_s == 3.0
    etcd.meanwhile = another_scheduler_writes
    await scheduler.following.change_slo({"ttft": 4.0})
    assert scheduler.active.slo.ttft_s == 9.0


class Fast(RoundRobin):
    """A policy that plans for fast first tokens only."""

    needs = (Fact.TTFT_SLO,)

    def __init__(self, *, ttft_slo_s: float = 1.0) -> None:
        super().__init__()
        if ttft_slo_s > 2.0:
            raise ValueError(f"ttft_slo_s: {ttft_slo_s:g} s is too slow")


async def test_slos_that_the_policy_in_force_refuses_are_not_written(
    etcd: Etcd, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [EntryPoint("fast", f"{__name__}:Fast", registry.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    plugins.plugins.cache_clear()
    try:
        await scheduler.set_policy(PolicyRecord(name="fast"))
        await scheduler.following.change_slo({"ttft": 1.5})
        with pytest.raises(AdminError, match=r"slo: not for the policy in force: .*3 s is too slow"):
            await scheduler.following.change_slo({"ttft": 3.0})
    finally:
        plugins.plugins.cache_clear()
    assert scheduler.active.slo.ttft_s == etcd.written_slo.ttft_s == 1.5


async def test_a_suspension_holds_until_it_is_written_and_then_until_a_policy_is_set(
    etcd: Etcd, scheduler: Scheduler
) -> None:
    await scheduler.set_policy(ROBIN)
    etcd.show()
    etcd.down = True
    running = asyncio.create_task(scheduler.following.run())
    scheduler.following.suspend("why")
    await asyncio.sleep(0)
    scheduler.following.follow()
    assert scheduler.active.record == suspended(ROBIN, "why")
    # Set while its suspension could not be written.
    await scheduler.set_policy(ROBIN)
    assert scheduler.active.record == ROBIN
    etcd.down = False
    etcd.wrote.clear()
    scheduler.following.suspend("again")
    await etcd.wrote.wait()
    assert etcd.written == suspended(ROBIN, "again")
    # Another event, before the watch has shown the suspension.
    scheduler.following.follow()
    assert scheduler.active.record == suspended(ROBIN, "again")
    etcd.show()
    scheduler.following.follow()
    await scheduler.set_policy(ROBIN)
    assert scheduler.active.record == ROBIN
    running.cancel()
    await asyncio.wait([running])


async def test_a_policy_that_hung_is_suspended_from_the_start_if_it_is_still_set(etcd: Etcd) -> None:
    etcd.write(ROBIN)
    etcd.show()
    again, meanwhile = Scheduler(etcd), Scheduler(etcd)
    again.following.suspend_record(suspended(ROBIN, "place: did not return"))
    again.following.follow()
    assert (again.active.name, again.active.record.name) == ("least_loaded", "round_robin")
    # Somebody has set another one while it restarted.
    meanwhile.following.suspend_record(suspended(ARROW, "place: did not return"))
    meanwhile.following.follow()
    assert meanwhile.active.record == ROBIN


async def test_the_default_policy_can_be_suspended(etcd: Etcd, scheduler: Scheduler) -> None:
    running = asyncio.create_task(scheduler.following.run())
    scheduler.following.suspend("why")
    await etcd.wrote.wait()
    assert etcd.written == suspended(LEAST, "why")
    etcd.show()
    scheduler.following.follow()
    assert scheduler.active.record == suspended(LEAST, "why")
    running.cancel()
    await asyncio.wait([running])
