"""Which migrations are requested from the migration service, and which are refused for what reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.drainer import Drainer
from scheduler_svc.migrations import Migrations, MigrationStarter, OnChange
from tailrace.actions import Migrate
from tailrace.cluster import RequestView
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.handover import Handover, TransferMode, by_replay
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.v1.migration_pb2 import MigrateRequest, MigrationRecord
from tailrace.v1.worker_pb2 import COPY_MODE_PRE_COPY
from tests.scheduler.facts import instance, report_to, request, set_members, steady
from tests.scheduler.test_decisions import Scheduler
from tests.static_members import StaticMembers

MODEL = ModelIdentity("text", "weights", "bf16")


def record(
    name: str, layout: str = "blocks of 16", model: ModelIdentity = MODEL, handover: Handover | None = None
) -> InstanceRecord:
    """Return an instance whose KV has this layout."""
    return msgspec.structs.replace(
        instance(name),
        model_fingerprint=layout,
        model_identity=model,
        handover=handover or Handover(),
    )


FLEET = [
    record("a"),
    record("alike"),
    record("older", "blocks of 32"),
    record("drafts", handover=by_replay("a draft model")),
    record("lower", "other", ModelIdentity("text", "weights", "fp8")),
    record("embeds", handover=Handover(TransferMode.STAYS, "a pooling model")),
]


@pytest_asyncio.fixture
async def mover() -> AsyncIterator[tuple[MigrationStarter, RequestView]]:
    """Yield a migration starter and a request on `a`."""
    state, channels = ReportedCluster(), Channels()
    set_members(state, StaticMembers(instances={each.instance_id: each for each in FLEET}), 0.0)
    report_to(state, steady("a", [request("r")]), 1.0)
    found = state.request("r")
    assert found is not None
    yield MigrationStarter(state, Migrations(StaticMembers(), channels)), found  # type: ignore[arg-type]
    await channels.close()


@pytest.mark.parametrize("target", ["alike", "older", "drafts"])
async def test_a_request_may_migrate_to_compatible_instances(
    mover: tuple[MigrationStarter, RequestView], target: str
) -> None:
    mover[0].check(mover[1], target)


@pytest.mark.parametrize(
    ("target", "reason"), [("lower", "dtype, quantization, kv_cache_dtype"), ("embeds", "a pooling model")]
)
async def test_incompatible_targets_are_refused_with_the_reason(
    mover: tuple[MigrationStarter, RequestView], target: str, reason: str
) -> None:
    with pytest.raises(AdminError, match=reason):
        mover[0].check(mover[1], target)


async def test_a_slow_watcher_misses_states_but_not_the_end(
    mover: tuple[MigrationStarter, RequestView], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def migrate(_: Migrations, request: MigrateRequest, on_change: OnChange) -> MigrationRecord:
        for number in range(100):
            on_change(MigrationRecord(bytes=number))
        return MigrationRecord(bytes=100)

    monkeypatch.setattr(Migrations, "migrate", migrate)
    starter, moving = mover
    told = [r.bytes async for r in starter.move(moving, "alike", "test", "test", COPY_MODE_PRE_COPY)]
    assert 50 < len(told) < 100 and told == [*range(101 - len(told), 101)]


async def test_a_migration_whose_watcher_leaves_counts_no_more(
    mover: tuple[MigrationStarter, RequestView], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def migrate(_: Migrations, request: MigrateRequest, on_change: OnChange) -> MigrationRecord:
        on_change(MigrationRecord())
        await asyncio.Event().wait()
        return MigrationRecord()

    monkeypatch.setattr(Migrations, "migrate", migrate)
    starter, moving = mover
    for _ in range(2):
        watching = starter.move(moving, "alike", "test", "test", COPY_MODE_PRE_COPY)
        await anext(watching)
        with pytest.raises(AdminError, match="a migration of it is open"):
            starter.move(moving, "alike", "test", "test", COPY_MODE_PRE_COPY)
        await watching.aclose()


def drain_target(*others: InstanceRecord) -> str:
    """Return the target of the only request of `a` when `a` is drained."""
    scheduler = Scheduler()
    fleet = [record("a"), *others]
    set_members(
        scheduler.state,
        StaticMembers(instances={each.instance_id: each for each in fleet}, draining=frozenset("a")),
        0.0,
    )
    report_to(scheduler.state, steady("a", [request("r")]), 1.0)
    leading = asyncio.Event()
    leading.set()
    Drainer(scheduler.state, scheduler.executor, leading).run_once(1.0)
    return next((each.target_id for each in scheduler.executor.actions if isinstance(each, Migrate)), "")


def test_a_drain_replays_if_no_instance_accepts_the_kv() -> None:
    older, lower = record("older", "blocks of 32"), record("lower", "other", ModelIdentity("text", "weights"))
    assert drain_target(older, record("z")) == "z"
    assert drain_target(older, lower) == "older"
    assert drain_target(lower) == ""
