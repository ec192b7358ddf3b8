"""A front end uses only instances of its model, and a stream keeps the model that generated its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from frontend_svc.fleet import ModelFleet, ServedModel
from frontend_svc.placement import Chosen, InstanceChooser, NoneChosen
from frontend_svc.streams import StreamTable
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.v1 import scheduler_pb2
from tests.frontend.fleet import record
from tests.frontend.test_placement import AttachedOutbox, Scheduler, scheduler
from tests.static_members import StaticMembers

SERVED_ROUTES = ServedModel("/models/m", ModelIdentity("text", "weights"))
NOWHERE: frozenset[str] = frozenset()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    yield channels
    await channels.close()


def running(identity: ModelIdentity, model: str = "/models/m", instance_id: str = "a") -> InstanceRecord:
    """Return the record of an instance that runs this model."""
    plain = record(instance_id, "127.0.0.1:1")
    return msgspec.structs.replace(plain, model=model, model_identity=identity)


@pytest.mark.parametrize(
    ("identity", "runs"),
    [
        (ModelIdentity("text", "weights"), True),
        (ModelIdentity("text", "weights", "bfloat16"), True),
        (ModelIdentity("text", "others"), False),
        (ModelIdentity("other text", "weights"), False),
    ],
)
def test_instance_runs_the_model_if_configuration_tokenizer_and_weights_match(
    identity: ModelIdentity, runs: bool
) -> None:
    assert SERVED_ROUTES.is_run_by(running(identity, "/elsewhere")) is runs


def test_front_end_without_weights_matches_models_by_name() -> None:
    served = ServedModel("/models/m", ModelIdentity("text"))
    assert served.is_run_by(running(ModelIdentity("text", "any"), "/models/m"))
    assert not served.is_run_by(running(ModelIdentity("text", "any"), "/models/other"))
    assert not served.is_run_by(running(ModelIdentity("other text", "any"), "/models/m"))


def test_instances_of_another_model_are_excluded_from_the_fleet() -> None:
    members = StaticMembers()
    members.instances["a"] = running(SERVED_ROUTES.identity)
    fleet = ModelFleet(members, SERVED_ROUTES)
    fleet.add_listener(fleet.refresh)
    members.instances["b"] = running(ModelIdentity("text", "others"), instance_id="b")
    members.changed()
    assert list(fleet.instances) == ["a"]
    # Restarted with the other model under the same name.
    members.instances["a"] = running(ModelIdentity("text", "others"))
    members.changed()
    assert list(fleet.instances) == []


def fleet_of(**precisions: str) -> ModelFleet:
    """Return a fleet with instances of one model at these precisions."""
    members = StaticMembers()
    for name, precision in precisions.items():
        members.instances[name] = running(ModelIdentity("text", "weights", precision), instance_id=name)
    return ModelFleet(members, SERVED_ROUTES)


async def test_fallback_keeps_a_stream_with_tokens_on_the_model_that_made_them(channels: Channels) -> None:
    fleet, table, outbox = fleet_of(a="fp8", b="bf16", c="bf16"), StreamTable(), AttachedOutbox("a", "b", "c")
    chooser = InstanceChooser("f0", fleet, outbox, table, channels)
    stream = table.open("r")
    assert await chooser.choose(stream, NOWHERE) == Chosen("a", "fallback")
    stream.model = chooser.model_of("b")
    # Without tokens, any model can start over.
    assert await chooser.choose(stream, frozenset("b")) == Chosen("a", "fallback")
    stream.token_ids.append(1)
    assert await chooser.choose(stream, frozenset("b")) == Chosen("c", "fallback")
    outbox.instance_ids.remove("c")
    refused = await chooser.choose(stream, frozenset("b"))
    assert refused == NoneChosen("no instance of its model answers")


async def test_placement_request_names_the_model_and_a_reply_with_another_is_ignored(
    channels: Channels,
) -> None:
    members = StaticMembers()
    for name, precision in (("a", "fp8"), ("b", "bf16")):
        members.instances[name] = running(ModelIdentity("text", "weights", precision), instance_id=name)
    table = StreamTable()
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id="a"))
    async with scheduler(members, "s0", leader):
        chooser = InstanceChooser(
            "f0", ModelFleet(members, SERVED_ROUTES), AttachedOutbox("a", "b"), table, channels
        )
        stream = table.open("r")
        assert await chooser.choose(stream, NOWHERE) == Chosen("a", "")
        stream.model = chooser.model_of("b")
        stream.token_ids.append(1)
        assert await chooser.choose(stream, NOWHERE) == Chosen("b", "fallback")
    # Both precisions suit a new request; a fleet with a single precision names it.
    assert leader.place_requests[0].model == "text:weights"
    assert fleet_of(a="fp8", b="fp8").model == "text:weights:fp8"
    assert {each.model for each in leader.place_requests[1:]} == {"text:weights:bf16"}
