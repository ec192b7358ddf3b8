"""A front end uses the instances that run its model, and a stream keeps to the one that made its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from frontend_svc.fleet import Fleet, ServedModel
from frontend_svc.placement import NoPlacement, Placed, Placement
from frontend_svc.streams import StreamTable
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.v1 import scheduler_pb2
from tests.frontend.fleet import StaticMembers, record
from tests.frontend.test_placement import Attached, Scheduler, scheduler

SERVED_ROUTES = ServedModel("/models/m", ModelIdentity("text", "weights"))
NOWHERE: frozenset[str] = frozenset()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    yield channels
    await channels.close()


def running(
    identity: ModelIdentity | None, model: str = "/models/m", instance_id: str = "a"
) -> InstanceRecord:
    """An instance that runs this."""
    plain = record(instance_id, "127.0.0.1:1")
    return msgspec.structs.replace(plain, model=model, model_identity=identity)


@pytest.mark.parametrize(
    ("identity", "runs"),
    [
        (ModelIdentity("text", "weights"), True),
        (ModelIdentity("text", "weights", "bfloat16"), True),
        (ModelIdentity("text", "others"), False),
        (ModelIdentity("other text", "weights"), False),
        # A version that does not tell: while a fleet is being upgraded.
        (None, True),
    ],
)
def test_an_instance_runs_the_model_if_configuration_tokenizer_and_weights_are_equal(
    identity: ModelIdentity | None, runs: bool
) -> None:
    assert SERVED_ROUTES.is_run_by(running(identity, "/elsewhere")) is runs


def test_a_front_end_without_weights_goes_by_the_models_name() -> None:
    served = ServedModel("/models/m", ModelIdentity("text"))
    assert served.is_run_by(running(ModelIdentity("text", "any"), "/models/m"))
    assert not served.is_run_by(running(ModelIdentity("text", "any"), "/models/other"))
    assert not served.is_run_by(running(ModelIdentity("other text", "any"), "/models/m"))


def test_instances_of_another_model_are_not_in_the_fleet() -> None:
    members = StaticMembers()
    members.instances["a"] = running(SERVED_ROUTES.identity)
    fleet = Fleet(members, SERVED_ROUTES)
    fleet.add_listener(fleet.refresh)
    members.instances["b"] = running(ModelIdentity("text", "others"), instance_id="b")
    members.changed()
    assert list(fleet.instances) == ["a"]
    # Started again with the other model, under the same name.
    members.instances["a"] = running(ModelIdentity("text", "others"))
    members.changed()
    assert list(fleet.instances) == []


def fleet_of(**precisions: str) -> Fleet:
    """Instances of one model that were told to use these precisions."""
    members = StaticMembers()
    for name, precision in precisions.items():
        members.instances[name] = running(ModelIdentity("text", "weights", precision), instance_id=name)
    return Fleet(members, SERVED_ROUTES)


async def test_without_a_scheduler_a_stream_with_tokens_stays_with_what_made_them(channels: Channels) -> None:
    fleet, table, outbox = fleet_of(a="fp8", b="bf16", c="bf16"), StreamTable(), Attached("a", "b", "c")
    placement = Placement("f0", fleet, outbox, table, channels)
    stream = table.open("r")
    assert await placement.choose(stream, NOWHERE) == Placed("a", "fallback")
    stream.model = placement.model_of("b")
    # Nothing was made yet that another one could not go on with.
    assert await placement.choose(stream, frozenset("b")) == Placed("a", "fallback")
    stream.token_ids.append(1)
    assert await placement.choose(stream, frozenset("b")) == Placed("c", "fallback")
    outbox.instance_ids.remove("c")
    refused = await placement.choose(stream, frozenset("b"))
    assert refused == NoPlacement("no instance of its model answers")


async def test_a_scheduler_is_told_the_model_and_not_believed_another(channels: Channels) -> None:
    members = StaticMembers()
    for name, precision in (("a", "fp8"), ("b", "bf16")):
        members.instances[name] = running(ModelIdentity("text", "weights", precision), instance_id=name)
    table = StreamTable()
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id="a"))
    async with scheduler(members, "s0", leader):
        placement = Placement("f0", Fleet(members, SERVED_ROUTES), Attached("a", "b"), table, channels)
        stream = table.open("r")
        assert await placement.choose(stream, NOWHERE) == Placed("a", "")
        stream.model = placement.model_of("b")
        stream.token_ids.append(1)
        assert await placement.choose(stream, NOWHERE) == Placed("b", "fallback")
    # Both will do for a new one; and if there were one precision, it would be named.
    assert leader.asked[0].model == "text:weights"
    assert fleet_of(a="fp8", b="fp8").model == "text:weights:fp8"
    assert {each.model for each in leader.asked[1:]} == {"text:weights:bf16"}
