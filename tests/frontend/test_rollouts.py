"""Two models of one name: the rollout decides which gets new requests, and each answer keeps its model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from frontend_svc.admission import CANNOT_GO_ON, AdmissionState, Refusal
from frontend_svc.fleet import ModelFleet, ServedModel
from frontend_svc.placement import prefix_of
from frontend_svc.settings import Limits
from frontend_svc.streams import StreamTable
from scheduler_svc.servicer import newer_rollout
from tailrace.cache.names import ALGORITHM, Keys, Naming, block_names
from tailrace.model_identity import AdapterVersions, ModelIdentity
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.v1 import scheduler_pb2
from tailrace.wire.outputs import FinishReason
from tailrace.wire.requests import EngineCoreRequest
from tests.frontend.conftest import Rig, eventually, open_rig
from tests.frontend.fake_api_server import NIL
from tests.frontend.scripted_worker import FINISHED, outputs
from tests.frontend.test_adopt import adopt
from tests.frontend.test_models import running
from tests.frontend.test_placement import Scheduler, scheduler
from tests.frontend.test_relocation import send_returned
from tests.static_members import StaticMembers

OLD, NEW = ModelIdentity("text", "old", "bf16"), ModelIdentity("text", "new", "bf16")
SERVED_ROUTES = ServedModel("/models/old", ModelIdentity("text", "old"), "chat")


def rollout(
    state: RolloutState, before: ModelIdentity = OLD, new: ModelIdentity = NEW, model: str = "chat"
) -> RolloutRecord:
    """Return the record of a rollout in this state."""
    return RolloutRecord(model=model, before=before.key, new=new.key, state=state, begun_s=1.0)


@pytest.fixture
def reported_models() -> list[frozenset[str]]:
    """The sets of models that the front end has reported to be connected to."""
    return []


@pytest.fixture
async def rig(tmp_path: Path, reported_models: list[frozenset[str]]) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, Limits(), served=SERVED_ROUTES, on_models=reported_models.append) as opened:
        yield opened


def follow(rig: Rig, record: RolloutRecord | None) -> None:
    """Publish the rollout to the front end, as through etcd."""
    rig.members.rollouts = {} if record is None else {record.model: record}
    rig.members.changed()


async def attached(rig: Rig, *names: str) -> None:
    await eventually(lambda: sorted(rig.engine.workers.attached()) == sorted(names))


async def test_new_requests_change_the_model_and_begun_answers_do_not(
    rig: Rig, reported_models: list[frozenset[str]]
) -> None:
    a, b = await rig.member("a", OLD), await rig.member("b", OLD)
    c = await rig.member("c", NEW)
    await attached(rig, "a", "b")
    await rig.front.ready()
    await rig.front.add("begun")
    begun = await a.submitted()
    a.send(outputs(begun, [1, 2], 0))
    await rig.front.tokens_of("begun", 2)

    # While it is prepared, the front end connects to both models; new requests still go to the old one.
    follow(rig, rollout(RolloutState.PREPARING))
    await attached(rig, "a", "b", "c")
    assert reported_models[-1] == {OLD.key, NEW.key}
    await rig.front.add("still old")
    still_old = await b.submitted()
    b.send(outputs(still_old, [9], 0, FINISHED))
    await rig.front.end_of("still old")

    # From then on they go to the new model, although its instance is busier than the idle old one.
    follow(rig, rollout(RolloutState.DRAINING))
    for name in ("new", "newer"):
        await rig.front.add(name)
        assert (await c.submitted()).request_id == name

    # An answer begun by an old instance is continued by another old one, from the next token.
    await rig.crash(a)
    again = await b.submitted()
    assert (again.request_id, list(again.output_token_ids)) == ("begun", [1, 2])
    b.send(outputs(again, [3], 2, FINISHED, epoch=1))
    await rig.front.end_of("begun")
    assert rig.front.tokens["begun"] == [1, 2, 3]

    # After a rollback the old model gets new requests again.
    follow(rig, rollout(RolloutState.DRAINING, before=NEW, new=OLD))
    await rig.front.add("old again")
    assert (await b.submitted()).request_id == "old again"


async def test_answer_ends_with_an_error_when_its_model_is_gone(rig: Rig) -> None:
    a, c = await rig.member("a", OLD), await rig.member("c", NEW)
    follow(rig, rollout(RolloutState.PREPARING))
    await attached(rig, "a", "c")
    await rig.front.ready()
    await rig.front.add("begun")
    await rig.front.add("waits")
    begun, waits = await a.submitted(), await a.submitted()
    assert {begun.request_id, waits.request_id} == {"begun", "waits"}
    if begun.request_id != "begun":
        begun, waits = waits, begun
    a.send(outputs(begun, [1], 0))
    await rig.front.tokens_of("begun", 1)
    follow(rig, rollout(RolloutState.DRAINING))
    await rig.crash(a)
    # It has no tokens yet, so the new model may answer it.
    taken_over = await c.submitted()
    assert taken_over.request_id == "waits"
    c.send(outputs(taken_over, [5], 0, FINISHED, epoch=1))
    await rig.front.end_of("waits")
    end = await rig.front.end_of("begun")
    assert (end.finish_reason, Refusal.decode(end.stop_reason)) == (FinishReason.ERROR, CANNOT_GO_ON)
    assert rig.front.tokens["begun"] == [1]


async def test_answer_continues_on_an_instance_that_only_the_rollout_drains(rig: Rig) -> None:
    """All old instances drain. The answer's owner is lost; one that an operator drains gets nothing."""
    a, b, _ = await rig.member("a", OLD), await rig.member("b", OLD), await rig.member("c", NEW)
    await rig.member("drained", OLD)
    follow(rig, rollout(RolloutState.PREPARING))
    await attached(rig, "a", "b", "c", "drained")
    await rig.front.ready()
    rig.members.draining = frozenset({"b", "drained"})
    rig.members.changed()
    await rig.front.add("begun")
    begun = await a.submitted()
    a.send(outputs(begun, [1], 0))
    await rig.front.tokens_of("begun", 1)
    rig.members.draining, rig.members.leaving = frozenset({"a", "b", "drained"}), frozenset({"a", "b"})
    follow(rig, rollout(RolloutState.DONE))
    # It is not moved from one draining instance to another.
    send_returned(a, begun)
    await rig.crash(a)
    taken_over = await b.submitted()
    assert (taken_over.request_id, list(taken_over.output_token_ids)) == ("begun", [1])
    b.send(outputs(taken_over, [2], 1, FINISHED, epoch=taken_over.epoch))
    await rig.front.end_of("begun")
    assert rig.front.tokens["begun"] == [1, 2]


async def test_migration_to_the_other_model_is_refused(rig: Rig) -> None:
    a, c = await rig.member("a", OLD), await rig.member("c", NEW)
    follow(rig, rollout(RolloutState.PREPARING))
    await attached(rig, "a", "c")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await a.submitted()
    a.send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    c.send(adopt(submit, 1))
    reply = (await c.expect("adopt_reply")).adopt_reply
    assert (reply.accepted, reply.reason) == (
        False,
        "the target runs another model than made the tokens so far",
    )
    a.send(outputs(submit, [2], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


async def test_migration_within_a_model_is_accepted(rig: Rig) -> None:
    a, b = await rig.member("a", OLD), await rig.member("b", OLD)
    follow(rig, rollout(RolloutState.PREPARING))
    await attached(rig, "a", "b")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await a.submitted()
    a.send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    b.send(adopt(submit, 1))
    assert (await b.expect("adopt_reply")).adopt_reply.accepted
    b.send(outputs(submit, [2], 1, FINISHED, epoch=1))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


async def test_admission_is_closed_without_an_instance_of_the_new_model(rig: Rig) -> None:
    await rig.member("a", OLD)
    await attached(rig, "a")
    await rig.front.ready()
    assert rig.admission.read() is AdmissionState.OPEN
    follow(rig, rollout(RolloutState.DRAINING))
    await eventually(lambda: rig.admission.read() is AdmissionState.NO_INSTANCE)
    follow(rig, rollout(RolloutState.FAILED))
    await eventually(lambda: rig.admission.read() is AdmissionState.OPEN)


async def test_new_requests_are_refused_while_the_rollout_is_unreadable(rig: Rig) -> None:
    """As in a front end that has just started: either model may be the wrong one."""
    a = await rig.member("a", OLD)
    await attached(rig, "a")
    await rig.front.ready()
    await rig.front.add("begun")
    begun = await a.submitted()
    a.send(outputs(begun, [1], 0))
    await rig.front.tokens_of("begun", 1)
    rig.members.unread_rollouts = frozenset({"chat"})
    rig.members.changed()
    await eventually(lambda: rig.admission.read() is AdmissionState.NO_INSTANCE)
    await rig.front.add("new")
    end = await rig.front.end_of("new")
    assert end.finish_reason == FinishReason.ERROR
    # A begun answer continues.
    a.send(outputs(begun, [2], 1, FINISHED))
    await rig.front.end_of("begun")
    assert rig.front.tokens["begun"] == [1, 2]
    rig.members.unread_rollouts = frozenset()
    follow(rig, rollout(RolloutState.PREPARING))
    await eventually(lambda: rig.admission.read() is AdmissionState.OPEN)


async def test_suspect_instances_of_the_new_model_get_requests_before_the_old_model(rig: Rig) -> None:
    """The leases of the new model's instances have expired, but they answer this front end."""
    await rig.member("a", OLD)
    c = await rig.member("c", NEW)
    follow(rig, rollout(RolloutState.DRAINING))
    await attached(rig, "a", "c")
    await rig.front.ready()
    rig.members.suspects = frozenset({"c"})
    rig.members.changed()
    assert rig.admission.read() is AdmissionState.OPEN
    await rig.front.add("r")
    assert (await c.submitted()).request_id == "r"


async def test_instance_that_left_the_fleet_keeps_its_model(rig: Rig) -> None:
    """It stays attached as long as it carries streams, and gets no requests for the other model."""
    await rig.member("a", OLD)
    c = await rig.member("c", NEW)
    follow(rig, rollout(RolloutState.DRAINING))
    await attached(rig, "a", "c")
    await rig.front.ready()
    del rig.members.instances["a"]
    rig.members.changed()
    assert sorted(rig.engine.workers.attached()) == ["a", "c"]
    for name in ("r", "s"):
        await rig.front.add(name)
        assert (await c.submitted()).request_id == name


async def test_front_end_cut_off_from_etcd_follows_the_schedulers_rollout(rig: Rig) -> None:
    """It has not learned of the rollout from etcd; the old instances take no more requests."""
    a, c = await rig.member("a", OLD), await rig.member("c", NEW)
    await attached(rig, "a")
    await rig.front.ready()
    rollouts = {"chat": rollout(RolloutState.PREPARING)}

    def place(request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply:
        of_model = {OLD.key: "a", NEW.key: "c"}[request.model]
        not_excluded = of_model not in request.excluded_instance_ids
        rolled_out = rollouts["chat"].state is RolloutState.DONE and of_model == "a"
        return scheduler_pb2.PlaceReply(
            instance_id=of_model if not_excluded and not rolled_out else "",
            refusal="" if not_excluded and not rolled_out else "none",
            rollout=newer_rollout(request, rollouts),
        )

    async with scheduler(rig.members, "s0", Scheduler(place)):
        await rig.front.add("before")
        begun = await a.submitted()
        assert begun.request_id == "before"
        a.send(outputs(begun, [1], 0))
        await rig.front.tokens_of("before", 1)
        rollouts["chat"] = rollout(RolloutState.DONE)
        await rig.front.add("after")
        assert (await c.submitted()).request_id == "after"
        # A begun answer ends where it is. Then etcd's watch catches up with an older state, and so does a
        # scheduler: the front end does not go back.
        a.send(outputs(begun, [2], 1, FINISHED))
        await rig.front.end_of("before")
        follow(rig, rollout(RolloutState.PREPARING))
        rollouts["chat"] = rollout(RolloutState.PREPARING)
        await rig.front.add("later")
        assert (await c.submitted()).request_id == "later"


@pytest.mark.parametrize(
    ("received", "follows"),
    [
        (rollout(RolloutState.DRAINING), True),
        # Not newer than the known one; of another name; with another tokenizer.
        (rollout(RolloutState.PREPARING), False),
        (rollout(RolloutState.DRAINING, model="other"), False),
        (rollout(RolloutState.DRAINING, new=ModelIdentity("other text", "new")), False),
        # Its instances joined after the front end was cut off: the old ones may still answer.
        (rollout(RolloutState.DRAINING, new=ModelIdentity("text", "newest")), False),
    ],
)
def test_front_end_follows_only_newer_rollouts_it_can_serve(received: RolloutRecord, follows: bool) -> None:
    members = StaticMembers()
    members.instances["old"] = running(OLD, instance_id="old")
    members.instances["new"] = running(NEW, instance_id="new")
    members.rollouts["chat"] = rollout(RolloutState.PREPARING)
    fleet = ModelFleet(members, SERVED_ROUTES)
    assert fleet.learn_rollout(received) is follows
    assert fleet.model == (NEW if follows else OLD).key
    # The same record again is not newer.
    assert not fleet.learn_rollout(received)


@pytest.mark.parametrize(
    ("record", "model", "names"),
    [
        # Of another name; of a model with another tokenizer, which this front end cannot serve.
        (rollout(RolloutState.DONE, model="other"), OLD.key, ["old"]),
        (rollout(RolloutState.DONE, new=ModelIdentity("other text", "new")), OLD.key, ["old"]),
        (rollout(RolloutState.DONE), NEW.key, ["new", "old"]),
        (rollout(RolloutState.PREPARING), OLD.key, ["new", "old"]),
        # The next rollout, while the front end still has the folder of the first model.
        (rollout(RolloutState.DONE, NEW, ModelIdentity("text", "newest")), "text:newest", ["new"]),
    ],
)
def test_model_and_instances_of_a_front_end_during_a_rollout(
    record: RolloutRecord, model: str, names: list[str]
) -> None:
    members = StaticMembers()
    members.instances["old"] = running(OLD, instance_id="old")
    members.instances["new"] = running(NEW, instance_id="new")
    members.rollouts[record.model] = record
    fleet = ModelFleet(members, SERVED_ROUTES)
    assert (fleet.model, sorted(fleet.instances)) == (model, names)


async def test_stream_keeps_the_version_of_its_adapter(rig: Rig, tmp_path: Path) -> None:
    """The version at the request's arrival is used, wherever the stream continues."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"first")
    first = AdapterVersions().of(str(folder))
    workers = [await rig.member(name, OLD) for name in "ab"]
    for name in "ab":
        rig.members.instances[name] = replace(rig.members.instances[name], takes_adapters=True)
    rig.members.changed()
    await attached(rig, "a", "b")
    await rig.front.ready()
    await rig.front.add("r", adapter=("sql", 1, str(folder)))
    submit = await workers[0].submitted()
    assert submit.adapter_version == first != ""
    (folder / "adapter_model.safetensors").write_bytes(b"second, which is longer")
    workers[0].send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    await rig.crash(workers[0])
    again = await workers[1].submitted()
    assert (again.adapter_version, list(again.output_token_ids)) == (first, [1])
    # New requests use the current files.
    await rig.front.add("s", adapter=("sql", 1, str(folder)))
    later = await workers[1].submitted()
    assert later.adapter_version == AdapterVersions().of(str(folder)) != first
    await rig.front.add("t", adapter=("hub", 1, "somebody/adapter"))
    assert (await workers[1].submitted()).adapter_version == ""


def test_block_names_depend_on_the_adapter_version() -> None:
    naming = Naming(algorithm=ALGORITHM, seed="0", block_tokens=16)
    request = EngineCoreRequest(
        "r",
        [*range(40)],
        NIL,
        None,
        NIL,
        0.0,
        msgspec.Raw(msgspec.msgpack.encode(("sql", 1, "/a"))),
        None,
        None,
    )
    stream = StreamTable().open("r", (msgspec.msgpack.encode(request),))
    named = {}
    for version in ("", "1", "2"):
        stream.adapter_version = version
        # As the engine names the adapter (worker_agent/engine/vllm/adapters.py).
        keys = Keys(adapter=(f"sql /a {version}".strip(), "/a"))
        named[version] = prefix_of(stream, naming).names
        assert named[version] == block_names([*range(40)], naming, keys)
    assert len({*map(tuple, named.values())}) == 3
