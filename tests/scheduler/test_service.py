"""Scheduler, monitor and migration service together, with a real etcd, through their gRPC APIs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import grpc
import msgspec
import pytest
from google.protobuf.message import Message

from scheduler_svc.admin import servicer
from scheduler_svc.admin.forward import FORWARDED
from tailrace.records import PolicyRecord, ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import FROM_SERVER
from tailrace.slo import Slo
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, migration_pb2, scheduler_pb2, types_pb2
from tailrace.v1.admin_pb2_grpc import AdminStub
from tests.harness.local_etcd import local_etcd
from tests.migration.scripted_worker import ABORTED, COMMITTED, PRE_COPY, STOP_AND_COPY, commit
from tests.scheduler.conftest import Control, leads, open_control
from tests.scheduler.facts import (
    ANSWERING,
    GONE,
    PREFILL,
    REASONING,
    event,
    place,
    place_one,
    request,
    steady,
)
from tests.streamed import read_message
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

ACTIVE = types_pb2.INSTANCE_STATE_ACTIVE
DRAINING = types_pb2.INSTANCE_STATE_DRAINING
SUSPECT = types_pb2.INSTANCE_STATE_SUSPECT


async def until(query: Callable[[], Awaitable[bool]]) -> None:
    """Repeat the query until it returns true; the services that it waits for run in the same process."""
    async with asyncio.timeout(WAIT_S):
        while not await query():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def requests(admin: AdminAsyncStub) -> dict[str, admin_pb2.RequestInfo]:
    """Return the running requests by ID."""
    reply = await admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=WAIT_S)
    return {r.request_id: r for r in reply.requests}


async def states(admin: AdminAsyncStub) -> dict[str, int]:
    """Return the states of instances by ID."""
    reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
    return {i.instance_id: i.state for i in reply.instances}


async def report_running(control: Control, admin: AdminAsyncStub, *names: str) -> None:
    """Let worker a report these requests, and wait until the scheduler knows them."""

    async def known() -> bool:
        await control.report(steady("a", [request(name) for name in names]), steady("b"))
        return set(names) <= (await requests(admin)).keys()

    await until(known)


async def call_error(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return the status and details of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def last_record(
    admin: AdminAsyncStub, request_id: str, target: str, reason: str = ""
) -> migration_pb2.MigrationRecord:
    """Migrate the request and return the last record."""
    migrate = admin_pb2.AdminMigrateRequest(request_id=request_id, target_instance_id=target, reason=reason)
    return [record async for record in admin.Migrate(migrate, timeout=WAIT_S)][-1]


async def test_place_and_list(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await until(lambda: _both_active(admin))
    placed = [
        await place_one(
            scheduler, scheduler_pb2.PlaceRequest(request_id=f"r{n}", prompt_tokens=100, max_tokens=10)
        )
        for n in range(4)
    ]
    assert sorted(p.instance_id for p in placed) == ["a", "a", "b", "b"]
    assert all(p.policy == "least_loaded" and p.decided_us > 0 for p in placed)
    excluded = scheduler_pb2.PlaceRequest(request_id="r9", excluded_instance_ids=["a", "b"])
    assert (await place_one(scheduler, excluded)).refusal == "no active instance"
    several = [scheduler_pb2.PlaceRequest(request_id=f"m{n}", prompt_tokens=100) for n in range(4)]
    together = await place(scheduler, *several)
    # Each placement counts the ones before it.
    assert sorted(reply.instance_id for reply in together) == ["a", "a", "b", "b"]
    several.append(scheduler_pb2.PlaceRequest())
    stream = scheduler.Place(timeout=WAIT_S)
    for batch in ("p", "q"):
        named = [scheduler_pb2.PlaceRequest(request_id=f"{batch}{n}") for n in range(2)]
        await stream.write(scheduler_pb2.PlaceManyRequest(requests=named))
        reply = await stream.read()
        assert isinstance(reply, scheduler_pb2.PlaceManyReply)
        assert sorted(each.instance_id for each in reply.replies) == ["a", "b"]
    await stream.write(scheduler_pb2.PlaceManyRequest(requests=several))
    code, details = await call_error(stream.read())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "requests[4].request_id: must not be empty")
    await report_running(control, admin, "x")
    info = (await requests(admin))["x"]
    assert (info.instance_id, info.phase, info.prompt_tokens) == ("a", REASONING, 100)
    services = await admin.ListServices(admin_pb2.ListServicesRequest(), timeout=WAIT_S)
    assert {(s.kind, s.id, s.leader) for s in services.services} >= {
        ("scheduler", "s1", True),
        ("monitor", "monitor", True),
    }


async def test_clusters_that_belong_to_ones_own_are_listed(control: Control) -> None:
    admin = await control.admin()

    async def clusters() -> list[tuple[str, list[str], int]]:
        reply = await admin.ListServices(admin_pb2.ListServicesRequest(), timeout=WAIT_S)
        return [(each.name, list(each.models), len(each.admin_addresses)) for each in reply.clusters]

    own = control.cluster
    assert await clusters() == [(own, [], 1)]
    scheduler = ServiceRecord(kind="scheduler", service_id="s", incarnation="1", address="10.0.0.1:7101")
    frontend = msgspec.structs.replace(scheduler, kind="frontend", model_name="coder")
    for name in (f"{own}.coder", f"{own}2"):
        other = await Store.connect([control.etcd], name)
        for record in (scheduler, frontend):
            await other.put(f"services/{record.kind}/s", msgspec.json.encode(record))
        await other.close()

    async def known() -> bool:
        return await clusters() == [(own, [], 1), (f"{own}.coder", ["coder"], 1)]

    await until(known)


async def test_a_phase_event_contains_the_prediction(control: Control) -> None:
    """Through monitor and scheduler, the prediction is known with the event, before any periodic report."""
    admin = await control.admin()
    await until(lambda: _both_active(admin))

    async def listed() -> bool:
        await control.report(event("a", "e", REASONING, predicted=123.0))
        return "e" in await requests(admin)

    await until(listed)
    assert (await requests(admin))["e"].predicted_remaining_tokens == 123.0


async def test_ares_dispatches_by_the_prediction_in_the_phase_event(control: Control) -> None:
    """b has less load now, c will have less: short requests go to b, long ones to c."""
    admin = await control.admin()
    await control.start_worker("c")
    await until(lambda: _is(admin, "c", ACTIVE))
    chosen = admin_pb2.SetPolicyRequest(name="ares", parameters={"dispatch": "variance"})
    await admin.SetPolicy(chosen, timeout=WAIT_S)
    for name, pool in (
        ("a", types_pb2.POOL_PREFILL),
        ("b", types_pb2.POOL_DECODE),
        ("c", types_pb2.POOL_DECODE),
    ):
        await admin.SetPool(admin_pb2.SetPoolRequest(instance_id=name, pool=pool), timeout=WAIT_S)
    staying = [request(f"b{n}", max_tokens=1_000, predicted=900.0) for n in range(8)]
    ending = [request(f"c{n}", max_tokens=1_000, predicted=100.0) for n in range(9)]

    async def known() -> bool:
        await control.report(steady("a"), steady("b", staying), steady("c", ending))
        reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        return {i.instance_id: (i.pool, i.running) for i in reply.instances} == {
            "a": (types_pb2.POOL_PREFILL, 0),
            "b": (types_pb2.POOL_DECODE, 8),
            "c": (types_pb2.POOL_DECODE, 9),
        }

    await until(known)
    await control.report(event("a", "short", REASONING, predicted=5.0))
    assert await _first_target(control, "short") == "b"
    await control.report(event("a", "long", REASONING, predicted=600.0))
    assert await _first_target(control, "long") == "c"


async def _first_target(control: Control, request_id: str) -> str:
    """Return the first target of the request; Algorithm 1 migrates others meanwhile."""
    found: asyncio.Queue[str] = asyncio.Queue()

    async def watch(name: str) -> None:
        while (await control.workers[name].imports.get()).request_id != request_id:
            pass
        found.put_nowait(name)

    watching = [asyncio.create_task(watch(name)) for name in ("b", "c")]
    try:
        return await asyncio.wait_for(found.get(), WAIT_S)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)


async def _both_active(admin: AdminAsyncStub) -> bool:
    return await states(admin) == {"a": ACTIVE, "b": ACTIVE}


async def test_migrate_a_request(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "chatcmpl-one", "chatcmpl-two")
    control.workers["b"].script = commit()
    order = admin_pb2.AdminMigrateRequest(request_id="one", target_instance_id="b", reason="why not")
    *progress, record = [record async for record in admin.Migrate(order, timeout=WAIT_S)]
    queued = types_pb2.MIGRATION_STATE_QUEUED
    assert [(each.state, len(each.rounds)) for each in progress] == [
        (queued, 0),
        (PRE_COPY, 1),
        (STOP_AND_COPY, 2),
    ]
    assert record.state == COMMITTED
    assert (record.request_id, record.reason, record.bytes, record.pause_ms) == (
        "chatcmpl-one",
        "why not",
        2000,
        4.0,
    )
    imported = await control.workers["b"].imports.get()
    assert (imported.from_epoch, imported.epoch, imported.source_instance_id) == (0, 1, "a")
    # An operator's migration does not wait for room.
    assert imported.room_wait_s == 0.0
    listed = await admin.ListMigrations(
        migration_pb2.ListMigrationsRequest(request_id="chatcmpl-one"), timeout=WAIT_S
    )
    assert [m.migration_id for m in listed.migrations] == [record.migration_id]


async def test_a_moved_request_can_be_named_at_once(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_SHOWN_WITHIN_S", WAIT_S)
    admin = await control.admin()
    await report_running(control, admin, "chatcmpl-one", "chatcmpl-two")
    control.workers["b"].script = commit()
    moved = asyncio.create_task(last_record(admin, "one", "b"))
    await control.workers["b"].imports.get()
    # Between this and the target's event nobody has the request.
    await control.report(event("a", "chatcmpl-one", GONE))
    await until(lambda: _lacks(admin, "chatcmpl-one"))
    assert not moved.done()
    await control.report(event("b", "chatcmpl-one", ANSWERING, epoch=1))
    assert (await moved).state == COMMITTED
    assert "chatcmpl-one" in await requests(admin)


async def _lacks(admin: AdminAsyncStub, request_id: str) -> bool:
    return not await _has(admin, request_id)


async def test_migrate_errors(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "chatcmpl-one", "chatcmpl-two")
    await control.report(event("a", "filling", PREFILL))
    await until(lambda: _has(admin, "filling"))
    await control.start_worker("c")
    await control.store.put("drains/c", b"1")
    await until(lambda: _is(admin, "c", DRAINING))
    expected = [
        ("", "b", grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty"),
        ("nope", "b", grpc.StatusCode.NOT_FOUND, "request_id: no running request 'nope'"),
        ("chatcmpl", "b", grpc.StatusCode.INVALID_ARGUMENT, "part of several request ids"),
        ("one", "", grpc.StatusCode.INVALID_ARGUMENT, "target_instance_id: must not be empty"),
        ("one", "x", grpc.StatusCode.NOT_FOUND, "target_instance_id: no instance 'x'"),
        ("one", "a", grpc.StatusCode.FAILED_PRECONDITION, "already on a"),
        ("one", "c", grpc.StatusCode.FAILED_PRECONDITION, "instance c is draining"),
        ("filling", "b", grpc.StatusCode.FAILED_PRECONDITION, "is in prefill"),
    ]
    for request_id, target, code, details in expected:
        error = await call_error(last_record(admin, request_id, target))
        assert error[0] is code
        assert details in error[1]


async def _has(admin: AdminAsyncStub, request_id: str) -> bool:
    return request_id in await requests(admin)


async def _is(admin: AdminAsyncStub, instance_id: str, state: int) -> bool:
    return (await states(admin)).get(instance_id) == state


async def test_one_migration_per_request_at_a_time(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "one")
    target = control.workers["b"]
    target.script = ["hang"]
    first = admin.Migrate(
        admin_pb2.AdminMigrateRequest(request_id="one", target_instance_id="b"), timeout=WAIT_S
    )
    reading = asyncio.create_task(_drop(first))
    await asyncio.wait_for(target.imports.get(), WAIT_S)
    code, details = await call_error(last_record(admin, "one", "b"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "open" in details
    first.cancel()
    await asyncio.wait([reading])


async def _drop(
    call: grpc.aio.UnaryStreamCall[admin_pb2.AdminMigrateRequest, migration_pb2.MigrationRecord],
) -> None:
    async for _ in call:
        pass


async def test_policy_pools_and_stages_can_be_set(control: Control) -> None:
    admin = await control.admin()
    reply = await admin.SetPolicy(admin_pb2.SetPolicyRequest(name="round_robin"), timeout=WAIT_S)
    assert reply.previous == "least_loaded"
    policies = await admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S)
    assert [p.name for p in policies.policies if p.active] == ["round_robin"]
    await until(lambda: _both_active(admin))
    pool = admin_pb2.SetPoolRequest(instance_id="a", pool=types_pb2.POOL_PREFILL)
    assert (await admin.SetPool(pool, timeout=WAIT_S)).previous == types_pb2.POOL_UNSPECIFIED
    assert (await admin.SetPool(pool, timeout=WAIT_S)).previous == types_pb2.POOL_PREFILL
    out = admin_pb2.SetPoolRequest(instance_id="a")
    assert (await admin.SetPool(out, timeout=WAIT_S)).previous == types_pb2.POOL_PREFILL
    await control.wait_for_members(lambda m: not m.pools)
    stages = [
        types_pb2.Stage(lo=0, hi=10, instance_ids=["a"]),
        types_pb2.Stage(lo=10, hi=20, instance_ids=["b"]),
    ]
    await admin.SetStages(admin_pb2.SetStagesRequest(stages=stages), timeout=WAIT_S)

    async def listed() -> bool:
        reply = await admin.ListStages(admin_pb2.ListStagesRequest(), timeout=WAIT_S)
        return list(reply.stages) == stages

    await until(listed)


async def test_a_policy_with_parameters(control: Control) -> None:
    await control.start_scheduler("scheduler-1")
    admin = await control.admin()
    given = {"quantum_tokens": "200", "demotion_tokens": "900"}
    await admin.SetPolicy(admin_pb2.SetPolicyRequest(name="pascal", parameters=given), timeout=WAIT_S)
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 200, "demotion_tokens": 900})
    await control.wait_for_members(lambda m: m.policy == record)
    address = control.members.services["scheduler", "scheduler-1"].address
    for scheduler in (admin, AdminStub(control.channels.get(address, Role.SCHEDULER))):

        async def applied(scheduler: AdminAsyncStub = scheduler) -> bool:
            reply = await scheduler.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S)
            infos = {info.name: info for info in reply.policies}
            values = {p.name: p.value for p in infos["pascal"].parameters}
            assert not any(p.value for p in infos["ares"].parameters)
            return infos["pascal"].active and given.items() <= values.items()

        await until(applied)
    reply = await admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S)
    pascal = {p.name: p for p in next(i for i in reply.policies if i.active).parameters}
    quantum = pascal["quantum_tokens"]
    assert (quantum.type, quantum.unit, quantum.default) == ("int", "tokens", "500")
    assert (quantum.source, quantum.allowed) == ("PASCAL, section V-A", "an integer of at least 1")
    assert pascal["behind_tokens"].value == "1.0"
    # Parameters are set together: omitted ones return to their defaults.
    reply_to_set = await admin.SetPolicy(
        admin_pb2.SetPolicyRequest(name="pascal", parameters={"behind_tokens": "2"}), timeout=WAIT_S
    )
    assert reply_to_set.previous == "pascal"
    assert dict(reply_to_set.previous_parameters) == given
    record = PolicyRecord(name="pascal", parameters={"behind_tokens": 2.0})
    await control.wait_for_members(lambda m: m.policy == record)


async def test_slos_can_be_read_and_set(control: Control) -> None:
    admin = await control.admin()
    found = (await admin.GetSlo(admin_pb2.GetSloRequest(), timeout=WAIT_S)).slo
    assert found == admin_pb2.Slo(ttft_s=2.0, tpot_s=0.15)
    change = admin_pb2.SetSloRequest(slo=admin_pb2.Slo(ttft_s=3.0, qoe=0.95))
    reply = await admin.SetSlo(change, timeout=WAIT_S)
    assert (reply.previous, reply.slo) == (found, admin_pb2.Slo(ttft_s=3.0, tpot_s=0.15, qoe=0.95))
    assert (await admin.GetSlo(admin_pb2.GetSloRequest(), timeout=WAIT_S)).slo == reply.slo
    await control.wait_for_members(lambda m: m.slo == Slo(3.0, 0.15, 0.95))
    await admin.SetSlo(admin_pb2.SetSloRequest(slo=admin_pb2.Slo(tpot_s=0.0)), timeout=WAIT_S)
    await control.wait_for_members(lambda m: m.slo == Slo(3.0, None, 0.95))
    await admin.SetSlo(admin_pb2.SetSloRequest(slo=admin_pb2.Slo(admit=0.5)), timeout=WAIT_S)
    await control.wait_for_members(lambda m: m.slo == Slo(3.0, None, 0.95, admit=0.5))


async def test_invalid_settings_are_refused(control: Control) -> None:
    admin = await control.admin()
    await until(lambda: _both_active(admin))
    stage = types_pb2.Stage
    bad: list[tuple[Awaitable[Message], grpc.StatusCode, str]] = [
        (
            admin.SetPolicy(admin_pb2.SetPolicyRequest(name="best"), timeout=WAIT_S),
            grpc.StatusCode.INVALID_ARGUMENT,
            "name: unknown policy 'best'; installed: ",
        ),
        (
            admin.SetPolicy(
                admin_pb2.SetPolicyRequest(name="pascal", parameters={"quantum": "200"}), timeout=WAIT_S
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "parameters: policy 'pascal' has no parameter 'quantum' (did you mean 'quantum_tokens'?); its ",
        ),
        (
            admin.SetPolicy(
                admin_pb2.SetPolicyRequest(name="pascal", parameters={"quantum_tokens": "-1"}), timeout=WAIT_S
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "parameter 'quantum_tokens': '-1' is not allowed; it is an integer of at least 1 (tokens)",
        ),
        (
            admin.SetSlo(admin_pb2.SetSloRequest(slo=admin_pb2.Slo(qoe=95.0)), timeout=WAIT_S),
            grpc.StatusCode.INVALID_ARGUMENT,
            "slo, parameter 'qoe': '95.0' is not allowed; it is a number from 0 to 1",
        ),
        (
            admin.SetPool(
                admin_pb2.SetPoolRequest(instance_id="x", pool=types_pb2.POOL_DECODE), timeout=WAIT_S
            ),
            grpc.StatusCode.NOT_FOUND,
            "instance_id: no instance 'x'; there are: a, b",
        ),
        (
            admin.SetStages(
                admin_pb2.SetStagesRequest(stages=[stage(lo=5, hi=5, instance_ids=["a"])]), timeout=WAIT_S
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "stages[0].hi",
        ),
        (
            admin.SetStages(
                admin_pb2.SetStagesRequest(
                    stages=[
                        stage(lo=0, hi=10, instance_ids=["a"]),
                        stage(lo=9, hi=20, instance_ids=["b"]),
                    ]
                ),
                timeout=WAIT_S,
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "stages[1].lo",
        ),
        (
            admin.SetStages(
                admin_pb2.SetStagesRequest(
                    stages=[
                        stage(lo=0, hi=10, instance_ids=["a"]),
                        stage(lo=10, hi=20, instance_ids=["b", "a"]),
                    ]
                ),
                timeout=WAIT_S,
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "stages[1].instance_ids: 'a' is named twice",
        ),
        (
            admin.SetStages(
                admin_pb2.SetStagesRequest(stages=[stage(lo=0, hi=10, instance_ids=["x"])]), timeout=WAIT_S
            ),
            grpc.StatusCode.NOT_FOUND,
            "stages[0].instance_ids: no instance 'x'",
        ),
        (
            admin.ListRequests(admin_pb2.ListRequestsRequest(instance_id="x"), timeout=WAIT_S),
            grpc.StatusCode.NOT_FOUND,
            "instance_id: no instance 'x'",
        ),
        (
            admin.GetTrace(admin_pb2.GetTraceRequest(id="x"), timeout=WAIT_S),
            grpc.StatusCode.NOT_FOUND,
            "id: no spans of 'x'",
        ),
    ]
    for call, code, details in bad:
        error = await call_error(call)
        assert error[0] is code
        assert details in error[1]


async def test_prefill_done_hands_over_by_policy(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await until(lambda: _both_active(admin))
    await control.report(steady("a"), steady("b"))
    await admin.SetPolicy(admin_pb2.SetPolicyRequest(name="static_pools"), timeout=WAIT_S)
    for name, pool in (("a", types_pb2.POOL_PREFILL), ("b", types_pb2.POOL_DECODE)):
        await admin.SetPool(admin_pb2.SetPoolRequest(instance_id=name, pool=pool), timeout=WAIT_S)

    async def pooled() -> bool:
        reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        return [i.pool for i in reply.instances] == [types_pb2.POOL_PREFILL, types_pb2.POOL_DECODE]

    await until(pooled)
    control.workers["b"].script = commit(1)
    for number in range(3):
        request_id = f"r{number}"
        arrival = scheduler_pb2.PlaceRequest(request_id=request_id, prompt_tokens=100, max_tokens=10)
        assert (await place_one(scheduler, arrival)).instance_id == "a"
        await control.report(event("a", request_id, REASONING))
        imported = await asyncio.wait_for(control.workers["b"].imports.get(), WAIT_S)
        assert (imported.request_id, imported.source_instance_id) == (request_id, "a")
        # As declared by `StaticPools.when_full`, it waits for room at a full target.
        assert imported.room_wait_s > 0.0


async def test_drain_and_undrain(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await report_running(control, admin, "one", "two")
    control.workers["b"].script = commit(1)
    draining = admin.Drain(admin_pb2.DrainRequest(instance_id="a"), timeout=WAIT_S)
    first = await read_message(draining, admin_pb2.DrainEvent)
    assert (first.remaining, first.done) == (2, False)
    imported = {
        (await asyncio.wait_for(control.workers["b"].imports.get(), WAIT_S)).request_id for _ in range(2)
    }
    assert imported == {"one", "two"}
    arrival = scheduler_pb2.PlaceRequest(request_id="new", prompt_tokens=1, max_tokens=1)
    assert (await place_one(scheduler, arrival)).instance_id == "b"

    async def reporting() -> None:
        """Keep reporting; the drain ends when the worker reports that it is empty."""
        while True:
            await control.report(steady("a"), steady("b", [request("one", epoch=1), request("two", epoch=1)]))

    worker = asyncio.create_task(reporting())
    try:
        last = first
        while not last.done:
            last = await read_message(draining, admin_pb2.DrainEvent)
    finally:
        worker.cancel()
        await asyncio.wait([worker])
    assert (last.remaining, last.done) == (0, True)
    listed = await admin.ListMigrations(migration_pb2.ListMigrationsRequest(), timeout=WAIT_S)
    assert {m.reason for m in listed.migrations} == {"drain"}
    undraining = admin.Drain(admin_pb2.DrainRequest(instance_id="a", undrain=True), timeout=WAIT_S)
    assert (await read_message(undraining, admin_pb2.DrainEvent)).done
    await until(lambda: _both_active(admin))


async def test_waiting_for_a_drain_ends_when_it_is_undone(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "one")
    draining = admin.Drain(admin_pb2.DrainRequest(instance_id="a"), timeout=WAIT_S)

    async def is_draining() -> bool:
        reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        return reply.instances[0].state == types_pb2.INSTANCE_STATE_DRAINING

    await until(is_draining)
    # Its requests cannot be moved: no worker imports them.
    undraining = admin.Drain(admin_pb2.DrainRequest(instance_id="a", undrain=True), timeout=WAIT_S)
    assert (await read_message(undraining, admin_pb2.DrainEvent)).done
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while (await read_message(draining, admin_pb2.DrainEvent)).remaining:
            pass
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert caught.value.details() == "a takes new requests again: somebody undrained it"


@pytest.mark.parametrize("silence_s", [2.0])
async def test_a_silent_instance_is_suspect(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await until(lambda: _both_active(admin))
    # Knows b without being told that it is silent.
    await control.start_monitor("second", WAIT_S)
    await control.report(steady("a"))
    await control.report(steady("b"), to="second")

    async def suspected() -> bool:
        return await states(admin) == {"a": SUSPECT, "b": ACTIVE}

    await until(suspected)
    arrival = scheduler_pb2.PlaceRequest(request_id="r", prompt_tokens=1, max_tokens=1)
    assert (await place_one(scheduler, arrival)).instance_id == "b"

    async def reports_again() -> bool:
        await control.report(steady("a"))
        return await _both_active(admin)

    await until(reports_again)


async def test_a_withdrawn_instance_disappears_at_once(control: Control) -> None:
    admin = await control.admin()
    await until(lambda: _both_active(admin))
    await control.workers["a"].registration.withdraw()
    await until(lambda: _only_b(admin))


async def _only_b(admin: AdminAsyncStub) -> bool:
    return await states(admin) == {"b": ACTIVE}


async def test_a_standby_places_lists_and_forwards_writes(control: Control) -> None:
    await control.start_scheduler("s2")
    admin, scheduler = await control.admin("s2"), await control.scheduler("s2")
    await until(lambda: _both_active(admin))
    arrival = scheduler_pb2.PlaceRequest(request_id="r", prompt_tokens=1, max_tokens=1)
    assert (await place_one(scheduler, arrival)).instance_id
    await admin.SetPolicy(admin_pb2.SetPolicyRequest(name="round_robin"), timeout=WAIT_S)
    code, details = await call_error(admin.SetPolicy(admin_pb2.SetPolicyRequest(name="best"), timeout=WAIT_S))
    assert (code, details[:14]) == (grpc.StatusCode.INVALID_ARGUMENT, "name: unknown ")
    await report_running(control, admin, "one")
    control.workers["b"].script = commit(1)
    leading = await control.admin("s1")
    await until(lambda: _has(leading, "one"))
    assert (await last_record(admin, "one", "b")).state == COMMITTED


async def test_a_standby_carries_settings_out_itself(control: Control) -> None:
    await control.start_scheduler("s2")
    admin = await control.admin("s2")
    await until(lambda: _both_active(admin))
    # A forwarded call is not forwarded again: what needs the leader fails here.
    here = (FORWARDED,)
    code, _ = await call_error(
        admin.SetShadow(admin_pb2.SetShadowRequest(name="round_robin"), timeout=WAIT_S, metadata=here)
    )
    assert code is grpc.StatusCode.UNAVAILABLE
    await admin.SetPolicy(admin_pb2.SetPolicyRequest(name="round_robin"), timeout=WAIT_S, metadata=here)
    await admin.SetSlo(admin_pb2.SetSloRequest(slo=admin_pb2.Slo(ttft_s=3.0)), timeout=WAIT_S, metadata=here)
    pool = admin_pb2.SetPoolRequest(instance_id="a", pool=types_pb2.POOL_PREFILL)
    await admin.SetPool(pool, timeout=WAIT_S, metadata=here)
    stages = admin_pb2.SetStagesRequest(stages=[types_pb2.Stage(lo=0, hi=9, instance_ids=["a", "b"])])
    await admin.SetStages(stages, timeout=WAIT_S, metadata=here)
    drain = admin.Drain(admin_pb2.DrainRequest(instance_id="b"), timeout=WAIT_S, metadata=here)
    assert (await read_message(drain, admin_pb2.DrainEvent)).remaining == 0
    drain.cancel()
    leading = await control.admin("s1")
    await until(lambda: _has_settings(leading))
    await control.wait_for_members(lambda m: m.drained == {"b"})
    assert control.members.policy == PolicyRecord(name="round_robin")
    assert control.members.slo.ttft_s == 3.0


async def _has_settings(admin: AdminAsyncStub) -> bool:
    policies = (await admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S)).policies
    infos = (await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)).instances
    stages = (await admin.ListStages(admin_pb2.ListStagesRequest(), timeout=WAIT_S)).stages
    pools = {info.instance_id: info.pool for info in infos}
    return (
        next(each.name for each in policies if each.active) == "round_robin"
        and pools["a"] == types_pb2.POOL_PREFILL
        and [stage.hi for stage in stages] == [9]
    )


async def test_a_shadow_ends_with_its_leaders_term(control: Control) -> None:
    admin = await control.admin()
    await admin.SetShadow(admin_pb2.SetShadowRequest(name="round_robin"), timeout=WAIT_S)
    # It steps down, and leads again at once.
    await control.store.delete("leader/scheduler")

    async def ended() -> bool:
        try:
            return not (await admin.GetShadow(admin_pb2.GetShadowRequest(), timeout=WAIT_S)).name
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False

    await until(ended)


async def test_the_series_of_an_instance_end_with_it(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await until(lambda: _both_active(admin))
    for number in range(4):
        arrival = scheduler_pb2.PlaceRequest(request_id=f"r{number}", prompt_tokens=100, max_tokens=10)
        await place_one(scheduler, arrival)
    address = control.members.services[("scheduler", "s1")].metrics_address

    async def shown() -> set[str]:
        text = await asyncio.to_thread(lambda: urlopen(f"http://{address}/metrics").read().decode())
        return set(re.findall(r'tailrace_scheduler_placements_total{instance="(\w)"', text))

    assert await shown() == {"a", "b"}
    await control.workers["b"].registration.withdraw()

    async def only_a() -> bool:
        return await shown() == {"a"}

    await until(only_a)


async def _policy_set(admin: AdminAsyncStub, name: str) -> bool:
    """Return whether a leading scheduler accepted the policy."""
    try:
        await admin.SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False
    return True


async def test_the_standby_takes_over(control: Control) -> None:
    await control.start_scheduler("s2")
    admin = await control.admin("s2")
    await control.stop("s1")
    await control.wait_for_members(
        lambda m: "scheduler" in m.leaders and m.leaders["scheduler"].service_id == "s2"
    )
    await until(lambda: leads(admin))
    await report_running(control, admin, "one")
    control.workers["b"].script = commit(1)
    assert (await last_record(admin, "one", "b")).state == COMMITTED


async def test_without_a_migration_service_migrations_fail(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "one")
    await control.stop("migration")
    await control.wait_for_members(lambda m: ("migration", "migration") not in m.services)
    with pytest.raises(grpc.aio.AioRpcError, match="no migration service responds") as failure:
        await last_record(admin, "one", "b")
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    # The command line uses this to see that the admin API itself works.
    assert FROM_SERVER in tuple(failure.value.trailing_metadata())
    # The request does not count as migrating.
    assert not (await requests(admin))["one"].migrating


async def test_an_aborted_migration_has_an_error(control: Control) -> None:
    admin = await control.admin()
    await report_running(control, admin, "one")
    control.workers["b"].script = []
    record = await last_record(admin, "one", "b")
    assert record.state == ABORTED
    assert record.error


async def test_without_a_monitor_the_last_known_state_is_used(control: Control) -> None:
    admin, scheduler = await control.admin(), await control.scheduler()
    await report_running(control, admin, "one")
    await control.stop("monitor")
    await control.wait_for_members(lambda m: ("monitor", "monitor") not in m.services)
    arrival = scheduler_pb2.PlaceRequest(request_id="r", prompt_tokens=1, max_tokens=1)
    assert (await place_one(scheduler, arrival)).instance_id == "b"
    assert "one" in await requests(admin)
    await control.start_monitor()
    await report_running(control, admin, "two")


async def test_an_etcd_outage(tmp_path: Path) -> None:
    """Placing and listing continue, writes are refused; after its return, everything works."""
    async with local_etcd(tmp_path / "etcd") as etcd, open_control(etcd.endpoint, "c", 2.0) as control:
        admin, scheduler = await control.admin(), await control.scheduler()
        await report_running(control, admin, "one")
        etcd.kill()

        async def steps_down() -> bool:
            return not await leads(admin)

        await until(steps_down)
        pool = admin_pb2.SetPoolRequest(instance_id="a", pool=types_pb2.POOL_DECODE)
        code, details = await call_error(admin.SetPool(pool, timeout=WAIT_S))
        assert code is grpc.StatusCode.UNAVAILABLE and details.startswith("etcd:")
        for number in range(4):
            arrival = scheduler_pb2.PlaceRequest(request_id=f"r{number}", prompt_tokens=1, max_tokens=1)
            assert (await place_one(scheduler, arrival)).instance_id
        # Reports need no etcd either.
        await report_running(control, admin, "two")

        async def reported_active() -> bool:
            # Each time anew: an instance that reports nothing for two seconds is suspect.
            await control.report(steady("a", [request("two")]), steady("b"))
            return await _both_active(admin)

        await until(reported_active)
        await etcd.start()
        await until(lambda: _policy_set(admin, "round_robin"))
        await until(reported_active)
