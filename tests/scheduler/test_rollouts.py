"""Rollouts through the admin API, with a real etcd and scripted front ends and workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest

from scheduler_svc.settings import Settings
from tailrace.model_identity import ModelIdentity, fingerprint
from tailrace.records import ServiceRecord
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.store.registration import Registration, register
from tailrace.telemetry.incidents import LOOP_FAILURES
from tailrace.v1 import admin_pb2, scheduler_pb2, types_pb2
from tests.migration.scripted_worker import commit
from tests.scheduler.conftest import Control
from tests.scheduler.facts import place_one, request, steady
from tests.scheduler.test_service import call_error, states, until
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

OLD, NEW = ModelIdentity("text", "old", "bf16"), ModelIdentity("text", "new", "bf16")
PREPARING, DRAINING = admin_pb2.ROLLOUT_STATE_PREPARING, admin_pb2.ROLLOUT_STATE_DRAINING
DONE, FAILED = admin_pb2.ROLLOUT_STATE_DONE, admin_pb2.ROLLOUT_STATE_FAILED
ROLLOUT = admin_pb2.RolloutRequest(model="chat", to=fingerprint(NEW.key))
# Between two reports of the workers.
PERIOD_S = 0.02


class FrontEnd:
    """The registration of a front end."""

    def __init__(self, registration: Registration, record: ServiceRecord) -> None:
        self.registration = registration
        self.record = record

    async def set_connected_models(self, *models: ModelIdentity) -> None:
        """Register as connected to instances of these models."""
        updated = msgspec.structs.replace(self.record, connected_models=[model.key for model in models])
        await self.registration.update(msgspec.json.encode(updated))


async def front_end(control: Control, name: str = "f0") -> FrontEnd:
    """Register a front end that was started with the old model and is connected to it."""
    record = ServiceRecord(
        kind="frontend",
        service_id=name,
        incarnation="1",
        address="127.0.0.1:1",
        model_name="chat",
        model="/old",
        model_key="text:old",
        connected_models=[OLD.key],
    )
    registration = await register(control.store, f"services/frontend/{name}", msgspec.json.encode(record))
    control.stack.push_async_callback(registration.withdraw)
    return FrontEnd(registration, record)


async def set_worker_model(control: Control, name: str, identity: ModelIdentity) -> None:
    """Register the worker with this model."""
    record = msgspec.structs.replace(
        control.members.instances[name], model_identity=identity, model_fingerprint=identity.key
    )
    await control.workers[name].registration.update(msgspec.json.encode(record))
    await control.wait_for_members(lambda m: m.instances[name].model_identity == identity)


@pytest.fixture
async def admin(control: Control) -> AdminAsyncStub:
    """Return the admin API of a cluster where a and b run the old model and c the new one."""
    await control.start_worker("c")
    for name, identity in (("a", OLD), ("b", OLD), ("c", NEW)):
        await set_worker_model(control, name, identity)
    admin = await control.admin()
    await until(lambda: _all_report(control, admin))
    return admin


async def _all_report(control: Control, admin: AdminAsyncStub) -> bool:
    await control.report(steady("a"), steady("b"), steady("c"))
    reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
    keys = [instance.model_key for instance in reply.instances if instance.kv_blocks_total]
    return keys == [OLD.key, OLD.key, NEW.key]


async def model(admin: AdminAsyncStub) -> admin_pb2.ModelInfo:
    """Return the listing of the only model."""
    (found,) = (await admin.ListModels(admin_pb2.ListModelsRequest(), timeout=WAIT_S)).models
    return found


class Reports:
    """Let the workers report all the time, with the requests in `held`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.held: dict[str, list[str]] = {"a": [], "b": [], "c": []}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            reports = [steady(name, [request(r) for r in held]) for name, held in self.held.items()]
            await self._control.report(*reports)
            await asyncio.sleep(PERIOD_S)


@pytest.fixture
async def reports(control: Control) -> AsyncIterator[Reports]:
    reports = Reports(control)
    yield reports
    reports.task.cancel()
    await asyncio.wait([reports.task])


async def ready_with_a_request(control: Control, admin: AdminAsyncStub, reports: Reports) -> None:
    """Connect a front end to both models, and let the old instance a have one request."""
    front = await front_end(control)
    await front.set_connected_models(OLD, NEW)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    reports.held["a"] = ["r1"]
    await until(lambda: _holds(admin, "a", 1))


async def wait_for_rollout(admin: AdminAsyncStub, wanted: Callable[[admin_pb2.RolloutInfo], bool]) -> None:
    async def satisfied() -> bool:
        return wanted((await model(admin)).rollout)

    await until(satisfied)


async def test_a_complete_rollout(control: Control, admin: AdminAsyncStub, reports: Reports) -> None:
    front = await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    reports.held["a"] = ["r1", "r2"]
    await until(lambda: _holds(admin, "a", 2))
    begun = await admin.Rollout(ROLLOUT, timeout=WAIT_S)
    assert (begun.state, begun.before, begun.new) == (PREPARING, fingerprint(OLD.key), fingerprint(NEW.key))
    assert "f0: connected to no instance" in begun.message
    # Repeating the call changes nothing.
    assert (await admin.Rollout(ROLLOUT, timeout=WAIT_S)).begun_s == begun.begun_s
    assert (await model(admin)).takes == fingerprint(OLD.key)
    await front.set_connected_models(OLD, NEW)
    # b is empty and drains first; then a, whose requests cannot migrate and finish there.
    await wait_for_rollout(admin, lambda rollout: list(rollout.draining_instance_ids) == ["b", "a"])
    found = await model(admin)
    assert (found.takes, list(found.frontend_ids)) == (fingerprint(NEW.key), ["f0"])
    assert [(list(v.instance_ids), v.takes_new, v.requests) for v in found.versions] == [
        (["c"], True, 0),
        (["a", "b"], False, 2),
    ]
    assert (await states(admin))["a"] == types_pb2.INSTANCE_STATE_DRAINING
    watch = admin.WatchRollout(
        admin_pb2.WatchRolloutRequest(model="chat", begun_s=begun.begun_s), timeout=WAIT_S
    )
    reports.held["a"] = []
    events = [event async for event in watch]
    assert [event.done for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].rollout.state == DONE
    assert "no request of" in events[-1].rollout.message
    # A worker that returns with the new model takes requests.
    await set_worker_model(control, "a", NEW)
    await until(lambda: _is_active(admin, "a"))


async def _is_active(admin: AdminAsyncStub, name: str) -> bool:
    return (await states(admin))[name] == types_pb2.INSTANCE_STATE_ACTIVE


async def _holds(admin: AdminAsyncStub, name: str, count: int) -> bool:
    reply = await admin.ListRequests(admin_pb2.ListRequestsRequest(instance_id=name), timeout=WAIT_S)
    return len(reply.requests) == count


async def test_requests_of_an_old_instance_migrate_to_another_old_one(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    front = await front_end(control)
    await front.set_connected_models(OLD, NEW)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    reports.held |= {"a": ["r1"], "b": ["r2", "r3"]}
    await until(lambda: _holds(admin, "b", 2))
    for name in "abc":
        control.workers[name].script = commit()
    await admin.Rollout(ROLLOUT, timeout=WAIT_S)
    expected = await asyncio.wait_for(control.workers["b"].imports.get(), WAIT_S)
    assert (expected.request_id, expected.source_instance_id) == ("r1", "a")
    assert control.workers["c"].imports.empty()


async def test_a_rollout_that_cannot_be_prepared_changes_nothing(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    request = admin_pb2.RolloutRequest(model="chat", to=NEW.key, prepare_s=0.1)
    await admin.Rollout(request, timeout=WAIT_S)
    await wait_for_rollout(admin, lambda rollout: rollout.state == FAILED)
    found = await model(admin)
    assert found.takes == fingerprint(OLD.key)
    assert found.rollout.reason == f"f0: connected to no instance of {fingerprint(NEW.key)}"
    assert not found.rollout.draining_instance_ids
    code, details = await call_error(
        admin.UndoRollout(admin_pb2.UndoRolloutRequest(model="chat"), timeout=WAIT_S)
    )
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "has changed nothing" in details
    # It can be retried, and forgotten once it is over.
    await admin.Rollout(request, timeout=WAIT_S)
    await wait_for_rollout(admin, lambda rollout: rollout.state == FAILED)
    await admin.ForgetRollout(admin_pb2.ForgetRolloutRequest(model="chat"), timeout=WAIT_S)
    await control.wait_for_members(lambda m: not m.rollouts)


async def test_an_undone_rollout_continues_with_the_next_leader(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    await ready_with_a_request(control, admin, reports)
    await control.start_scheduler("s2")
    await admin.Rollout(ROLLOUT, timeout=WAIT_S)
    await wait_for_rollout(admin, lambda rollout: list(rollout.draining_instance_ids) == ["b", "a"])
    second = await control.admin("s2")
    # The standby forwards the call to the leader.
    back = await second.UndoRollout(admin_pb2.UndoRolloutRequest(model="chat"), timeout=WAIT_S)
    assert back.undoes and back.new == fingerprint(OLD.key)
    watching = second.WatchRollout(admin_pb2.WatchRolloutRequest(model="chat"), timeout=WAIT_S)
    await control.cancel("s1")
    events = [event async for event in watching]
    assert events[-1].rollout.state == DONE
    assert (await model(second)).takes == fingerprint(OLD.key)
    record = control.members.rollouts["chat"]
    assert (record.state, record.in_force) == (RolloutState.DONE, OLD.key)
    assert (await states(second))["a"] == types_pb2.INSTANCE_STATE_ACTIVE
    assert (await states(second))["c"] == types_pb2.INSTANCE_STATE_DRAINING
    # A watch of the first rollout is aborted.
    old = second.WatchRollout(admin_pb2.WatchRolloutRequest(model="chat", begun_s=1.0), timeout=WAIT_S)
    code, details = await call_error(_drained(old))
    assert code is grpc.StatusCode.ABORTED and "another rollout of chat has begun" in details


async def test_undo_races_with_an_advancing_rollout(
    control: Control, admin: AdminAsyncStub, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready_with_a_request(control, admin, reports)
    await admin.Rollout(ROLLOUT, timeout=WAIT_S)
    await wait_for_rollout(admin, lambda rollout: rollout.state == DRAINING)
    swap = Settings._swap
    advanced: list[RolloutRecord] = []

    async def advance_first(
        settings: Settings, key: str, expected: bytes | None, value: bytes | None
    ) -> bool:
        if key == "rollouts/chat" and value and b'"undoes":true' in value and expected and not advanced:
            advanced.append(msgspec.json.decode(expected, type=RolloutRecord))
            later = msgspec.structs.replace(advanced[0], begun_s=advanced[0].begun_s + 1.0)
            await control.store.put(key, msgspec.json.encode(later))
        return await swap(settings, key, expected, value)

    monkeypatch.setattr(Settings, "_swap", advance_first)
    back = await admin.UndoRollout(admin_pb2.UndoRolloutRequest(model="chat"), timeout=WAIT_S)
    assert advanced and back.undoes and back.new == fingerprint(OLD.key)


BEGUN_LONG_AGO = RolloutRecord(
    model="chat", before=OLD.key, new=NEW.key, state=RolloutState.PREPARING, begun_s=1.0, min_warm=1
)


async def begun_long_ago(control: Control, admin: AdminAsyncStub) -> FrontEnd:
    """Begin a rollout that, by the leader's clock, began long ago; return the front end that it waits for."""
    front = await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    await control.store.put("rollouts/chat", msgspec.json.encode(BEGUN_LONG_AGO))
    await wait_for_rollout(admin, lambda rollout: "f0: connected to no instance" in rollout.message)
    return front


async def test_a_leader_with_another_clock_grants_the_full_time(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    """By this leader's clock, the rollout began long ago."""
    front = await begun_long_ago(control, admin)
    await front.set_connected_models(OLD, NEW)
    await wait_for_rollout(admin, lambda rollout: rollout.state == DONE)


async def test_a_record_of_a_later_version_is_not_overwritten(
    control: Control, admin: AdminAsyncStub
) -> None:
    await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    later = b'{"state": "canary"}'
    await control.store.put("rollouts/chat", later)
    calls: list[Awaitable[object]] = [
        admin.Rollout(ROLLOUT, timeout=WAIT_S),
        admin.UndoRollout(admin_pb2.UndoRolloutRequest(model="chat"), timeout=WAIT_S),
        admin.ForgetRollout(admin_pb2.ForgetRolloutRequest(model="chat"), timeout=WAIT_S),
    ]
    for call in calls:
        code, details = await call_error(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "the rollout of chat (rollouts/chat in etcd) cannot be read by this version" in details
    assert await control.store.get("rollouts/chat") == later


async def test_a_rollout_that_a_later_version_takes_over_does_not_end_the_leader(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    """And it goes on once its record can be read again."""
    failures = LOOP_FAILURES.labels("rollouts")
    before = failures._value.get()
    front = await begun_long_ago(control, admin)
    await control.store.put("rollouts/chat", b'{"state": "canary"}')
    # It would advance now, and may not write.
    await front.set_connected_models(OLD, NEW)
    await control.store.put("pools/a", b"decode")
    await control.wait_for_members(lambda m: "a" in m.pools)
    assert await control.store.get("rollouts/chat") == b'{"state": "canary"}'
    await control.store.put("rollouts/chat", msgspec.json.encode(BEGUN_LONG_AGO))
    await wait_for_rollout(admin, lambda rollout: rollout.state == DONE)
    assert failures._value.get() == before


async def test_starting_a_rollout_warns_of_few_instances(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    begun = await admin.Rollout(
        admin_pb2.RolloutRequest(model="chat", to=NEW.key, min_warm=2, prepare_s=0.1), timeout=WAIT_S
    )
    assert begun.warning.startswith(f"1 warm of {fingerprint(NEW.key)} will replace 2 of")
    await wait_for_rollout(admin, lambda rollout: rollout.state == FAILED)
    reason = (await model(admin)).rollout.reason
    assert reason == f"1 of 2 instances of {fingerprint(NEW.key)} are warm (--min-warm)"


async def test_watching_a_removed_rollout_is_aborted(
    control: Control, admin: AdminAsyncStub, reports: Reports
) -> None:
    """For example, when etcd is wiped."""
    await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    begun = await admin.Rollout(ROLLOUT, timeout=WAIT_S)
    watch = admin.WatchRollout(
        admin_pb2.WatchRolloutRequest(model="chat", begun_s=begun.begun_s), timeout=WAIT_S
    )
    assert (await anext(aiter(watch))).rollout.state == PREPARING
    await control.store.delete("rollouts/chat")
    code, details = await call_error(_drained(watch))
    assert code is grpc.StatusCode.ABORTED and "has been removed" in details


async def test_a_placement_contains_the_rollout(control: Control, admin: AdminAsyncStub) -> None:
    """A front end that is cut off from etcd learns of the rollout this way."""
    # It is over, so that the leader does not change the record meanwhile.
    record = RolloutRecord(
        model="chat",
        before=OLD.key,
        new=NEW.key,
        state=RolloutState.DONE,
        begun_s=1.0,
    )
    value = msgspec.json.encode(record)
    await control.store.put("rollouts/chat", value)
    scheduler = await control.scheduler()
    # A request that has tokens already sends no name: it keeps its model.
    expected = {
        (OLD.key, "chat"): value,
        ("text:old", "chat"): value,
        (NEW.key, "chat"): b"",
        (OLD.key, ""): b"",
    }

    async def rollout_in_reply(model: str, name: str) -> bytes:
        request = scheduler_pb2.PlaceRequest(
            request_id="r", prompt_tokens=1, max_tokens=1, model=model, served_name=name
        )
        return (await place_one(scheduler, request)).rollout

    async def heard() -> bool:
        return bool(await rollout_in_reply(OLD.key, "chat"))

    await until(heard)
    assert {key: await rollout_in_reply(*key) for key in expected} == expected


async def _drained(
    call: grpc.aio.UnaryStreamCall[admin_pb2.WatchRolloutRequest, admin_pb2.RolloutEvent],
) -> None:
    async for _ in call:
        pass


async def test_invalid_calls_are_refused_with_the_reason(control: Control, admin: AdminAsyncStub) -> None:
    await front_end(control)
    await control.wait_for_members(lambda m: ("frontend", "f0") in m.services)
    Request = admin_pb2.RolloutRequest
    invalid, unknown = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    refusals: list[tuple[Awaitable[object], grpc.StatusCode, str]] = [
        (admin.Rollout(Request(to="x"), timeout=WAIT_S), invalid, "model: must not be empty"),
        (admin.Rollout(Request(model="chat"), timeout=WAIT_S), invalid, "to: must not be empty"),
        (
            admin.Rollout(Request(model="chat", to="x", prepare_s=-1), timeout=WAIT_S),
            invalid,
            "prepare_s: must be from 0",
        ),
        (admin.Rollout(Request(model="cat", to="x"), timeout=WAIT_S), unknown, "they serve: chat"),
        (admin.Rollout(Request(model="chat", to="x"), timeout=WAIT_S), unknown, "no instance runs 'x'"),
        (
            admin.UndoRollout(admin_pb2.UndoRolloutRequest(model="chat"), timeout=WAIT_S),
            unknown,
            "there is no rollout of chat",
        ),
        (
            admin.ForgetRollout(admin_pb2.ForgetRolloutRequest(model="chat"), timeout=WAIT_S),
            unknown,
            "there is no rollout of chat",
        ),
        (
            _drained(admin.WatchRollout(admin_pb2.WatchRolloutRequest(model="chat"), timeout=WAIT_S)),
            unknown,
            "there is no rollout of chat",
        ),
    ]
    for call, code, message in refusals:
        got, details = await call_error(call)
        assert got is code
        assert message in details
    await control.store.put("drains/c", b"1")
    await until(lambda: _is_draining(admin, "c"))
    code, details = await call_error(admin.Rollout(ROLLOUT, timeout=WAIT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == f"no instance of {fingerprint(NEW.key)} is warm: c is drained by an operator"


async def _is_draining(admin: AdminAsyncStub, name: str) -> bool:
    return (await states(admin))[name] == types_pb2.INSTANCE_STATE_DRAINING
