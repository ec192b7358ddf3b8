"""Adoption of a request by a migration's target: the commit at the front end."""

from __future__ import annotations

import pytest

from frontend_svc import adopt as adopt_module
from frontend_svc.adopt import Commit, RefuseAdoption, Wait, evaluate
from frontend_svc.streams import StreamTable
from tailrace.v1 import worker_pb2
from tests.frontend.conftest import Rig, eventually
from tests.frontend.scripted_worker import FINISHED, ScriptedWorker, outputs
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for tokens in flight for as long as a busy machine may take."""
    monkeypatch.setattr(adopt_module, "IN_FLIGHT_S", WAIT_S)


def adopt(submit: worker_pb2.Submit, next_index: int, from_epoch: int = 0) -> worker_pb2.AttachDown:
    """Return the message that a target sends once it has all KV blocks."""
    return worker_pb2.AttachDown(
        adopt=worker_pb2.Adopt(
            migration_id="m",
            handle=submit.handle,
            request_id=submit.request_id,
            from_epoch=from_epoch,
            epoch=from_epoch + 1,
            next_index=next_index,
        )
    )


async def two_workers(rig: Rig) -> tuple[ScriptedWorker, ScriptedWorker, worker_pb2.Submit]:
    """Start a source that carries request r, and a target."""
    source, target = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r")
    return source, target, await source.submitted()


async def test_commit_changes_owner_and_epoch_atomically(rig: Rig) -> None:
    source, target, submit = await two_workers(rig)
    source.send(outputs(submit, [1, 2], 0))
    await rig.front.tokens_of("r", 2)
    target.send(adopt(submit, 2))
    reply = (await target.expect("adopt_reply")).adopt_reply
    assert (reply.accepted, reply.migration_id) == (True, "m")
    release = (await source.expect("release")).release
    assert (release.handle, release.epoch) == (submit.handle, 0)
    source.send(outputs(submit, [9], 2))
    target.send(outputs(submit, [3], 2, FINISHED, epoch=1))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2, 3]
    assert rig.count("adoptions_total") == 1


async def test_commit_waits_for_tokens_in_flight(rig: Rig) -> None:
    source, target, submit = await two_workers(rig)
    target.send(adopt(submit, 1))
    # The target's messages are read in order: this reply proves that Adopt has been read.
    query = worker_pb2.OwnershipQuery(handle=submit.handle, epoch=5)
    target.send(worker_pb2.AttachDown(ownership_query=query))
    assert not (await target.expect("ownership")).ownership.current
    source.send(outputs(submit, [1], 0))
    assert (await target.expect("adopt_reply")).adopt_reply.accepted
    target.send(outputs(submit, [2], 1, FINISHED, epoch=1))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


async def test_adoption_is_refused_if_tokens_never_arrive(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt_module, "IN_FLIGHT_S", 0.1)
    source, target, submit = await two_workers(rig)
    target.send(adopt(submit, 1))
    reply = (await target.expect("adopt_reply")).adopt_reply
    assert not reply.accepted and "did not arrive" in reply.reason
    source.send(outputs(submit, [1], 0, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1]


async def test_target_whose_connection_broke_meanwhile_gets_nothing(rig: Rig) -> None:
    """Its import has ended with the connection, even if it is connected again when the tokens arrive."""
    source, target, submit = await two_workers(rig)
    target.send(adopt(submit, 1))
    query = worker_pb2.OwnershipQuery(handle=submit.handle, epoch=5)
    target.send(worker_pb2.AttachDown(ownership_query=query))
    await target.expect("ownership")
    target.hang_up()
    await eventually(lambda: target.connections == 2 and "b" in rig.engine.workers.attached())
    source.send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    stream = rig.engine.table.find("r")
    assert stream is not None and stream.owner == "a"
    source.send(outputs(submit, [2], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


async def test_adoption_refusals_state_the_reason(rig: Rig) -> None:
    source, target, submit = await two_workers(rig)
    source.send(outputs(submit, [1, 2], 0))
    await rig.front.tokens_of("r", 2)
    for sender, message, reason in (
        (target, adopt(submit, 1), "continued"),
        (target, adopt(submit, 2, from_epoch=3), "is over"),
        (source, adopt(submit, 2), "already there"),
    ):
        sender.send(message)
        reply = (await sender.expect("adopt_reply")).adopt_reply
        assert not reply.accepted and not reply.gone and reason in reply.reason
    await rig.front.abort("r")
    await source.expect("abort")
    target.send(adopt(submit, 2))
    reply = (await target.expect("adopt_reply")).adopt_reply
    assert reply.gone and "ended" in reply.reason


async def test_source_that_queries_ownership_keeps_the_stream_and_the_target_is_refused(rig: Rig) -> None:
    source, target, submit = await two_workers(rig)
    target.send(adopt(submit, 1))
    query = worker_pb2.OwnershipQuery(handle=submit.handle, epoch=0)
    target.send(worker_pb2.AttachDown(ownership_query=query))
    assert not (await target.expect("ownership")).ownership.current
    source.send(worker_pb2.AttachDown(ownership_query=query))
    assert (await source.expect("ownership")).ownership.current
    assert not (await target.expect("adopt_reply")).adopt_reply.accepted
    source.send(outputs(submit, [1], 0, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1]


async def test_stream_is_recovered_when_the_target_dies_after_commit(rig: Rig) -> None:
    source, target, submit = await two_workers(rig)
    source.send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    target.send(adopt(submit, 1))
    await source.expect("release")
    await rig.crash(target)
    again = await source.submitted()
    assert (again.epoch, list(again.output_token_ids)) == (2, [1])
    source.send(outputs(again, [2], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Commit("a")),
        ({"next_index": 5}, Wait(2)),
        ({"next_index": 2}, RefuseAdoption("the source has continued to index 3")),
        ({"request_id": "q"}, RefuseAdoption("the handle names another request")),
        ({"from_epoch": 1, "epoch": 4}, RefuseAdoption("epoch 1 is over, it is 2 now")),
        ({"from_epoch": 3, "epoch": 4}, RefuseAdoption("epoch 3 is over, it is 2 now")),
        ({"epoch": 2}, RefuseAdoption("epoch 2 is not after 2")),
        ({"epoch": 1}, RefuseAdoption("epoch 1 is not after 2")),
        ({"epoch": 9}, Commit("a")),
    ],
)
def test_evaluate_adoption(changes: dict[str, int | str], verdict: Commit | Wait | RefuseAdoption) -> None:
    """Epochs may have gaps but never repeat."""
    table = StreamTable()
    stream = table.open("r")
    for _ in range(2):
        table.orphan(stream)
    stream.token_ids.extend([1, 2, 3])
    fields = {"handle": stream.handle, "request_id": "r", "from_epoch": 2, "epoch": 3, "next_index": 3}
    adopt_message = worker_pb2.Adopt(**{**fields, **changes})  # type: ignore[arg-type]
    if isinstance(verdict, Commit):
        unassigned = RefuseAdoption("the request is between instances")
        assert evaluate(table, stream, "b", adopt_message) == unassigned
    table.assign(stream, "a")
    assert evaluate(table, stream, "b", adopt_message) == verdict
    if isinstance(verdict, Commit):
        assert evaluate(table, stream, "a", adopt_message) == RefuseAdoption("the request is already there")
    table.close(stream)
    for ended_stream in (stream, None):
        assert evaluate(table, ended_stream, "b", adopt_message) == RefuseAdoption("the request has ended")
