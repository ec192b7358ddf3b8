"""Streams that a draining instance returns continue elsewhere, with every token once."""

from __future__ import annotations

import pytest

from tailrace.v1 import worker_pb2
from tests.frontend.conftest import Rig, eventually
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, ScriptedWorker, outputs


def announce_drain(worker: ScriptedWorker) -> None:
    worker.send(worker_pb2.AttachDown(draining=worker_pb2.Draining()))


def send_returned(worker: ScriptedWorker, submit: worker_pb2.Submit, epoch: int | None = None) -> None:
    epoch = submit.epoch if epoch is None else epoch
    message = worker_pb2.Returned(handles=[submit.handle], epochs=[epoch])
    worker.send(worker_pb2.AttachDown(returned=message))


async def begin_stream(rig: Rig, request_id: str, worker: ScriptedWorker) -> worker_pb2.Submit:
    """Begin a stream and return its submission once it has two tokens of this worker."""
    await rig.front.add(request_id)
    submit = await worker.submitted()
    worker.send(outputs(submit, [10, 11], 0, PREFILL_DONE))
    await rig.front.tokens_of(request_id, 2)
    return submit


async def test_returned_stream_continues_elsewhere(rig: Rig) -> None:
    leaving = await rig.worker("a")
    await rig.front.ready()
    submit = await begin_stream(rig, "r", leaving)
    taking = await rig.worker("b")
    announce_drain(leaving)
    send_returned(leaving, submit)
    again = await taking.submitted()
    assert (again.handle, again.epoch, list(again.output_token_ids)) == (submit.handle, 1, [10, 11])
    assert list((await leaving.expect("abort")).abort.handles) == [submit.handle]
    # Tokens that it generated before it read the abort are stale.
    leaving.send(outputs(submit, [99], 2))
    taking.send(outputs(again, [12], 2, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11, 12]
    assert rig.count("recoveries_total", cause="handed_back") == 1
    assert rig.count("recoveries_total", cause="lost") == 0


async def test_returned_stream_stays_if_there_is_no_other_instance(rig: Rig) -> None:
    leaving = await rig.worker("a")
    await rig.front.ready()
    submit = await begin_stream(rig, "r", leaving)
    announce_drain(leaving)
    send_returned(leaving, submit)
    leaving.send(outputs(submit, [12], 2))
    await rig.front.tokens_of("r", 3)
    # When another instance has joined, a repeated hand-back moves the stream there.
    taking = await rig.worker("b")
    send_returned(leaving, submit)
    again = await taking.submitted()
    assert list(again.output_token_ids) == [10, 11, 12]
    taking.send(outputs(again, [13], 3, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11, 12, 13]


async def test_instance_cannot_return_streams_it_does_not_own(rig: Rig) -> None:
    first = await rig.worker("a")
    await rig.front.ready()
    submit = await begin_stream(rig, "r", first)
    second = await rig.worker("b")
    send_returned(second, submit)
    send_returned(first, submit, epoch=7)
    send_returned(first, worker_pb2.Submit(handle=4711))
    first.send(outputs(submit, [12], 2, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11, 12]
    assert second.received.empty()


async def test_pending_adoption_is_refused_when_its_stream_is_relocated(rig: Rig) -> None:
    leaving = await rig.worker("a")
    await rig.front.ready()
    submit = await begin_stream(rig, "r", leaving)
    target = await rig.worker("b")
    adopt = worker_pb2.Adopt(
        migration_id="m", handle=submit.handle, request_id="r", from_epoch=0, epoch=1, next_index=5
    )
    target.send(worker_pb2.AttachDown(adopt=adopt))
    announce_drain(leaving)
    send_returned(leaving, submit)
    again = await target.submitted()
    # It is evaluated again at the stream's next progress, or when the wait for its missing tokens expires.
    target.send(outputs(again, [12], 2))
    assert not (await target.expect("adopt_reply")).adopt_reply.accepted
    target.send(outputs(again, [13], 3, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11, 12, 13]


async def test_draining_instance_gets_no_new_requests(rig: Rig) -> None:
    leaving, other = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    announce_drain(leaving)
    await eventually(lambda: "a" in rig.engine.fleet.draining)
    for number in range(4):
        await rig.front.add(f"r{number}")
        other.send(outputs(await other.submitted(), [1], 0, FINISHED))
        await rig.front.end_of(f"r{number}")
    assert leaving.received.empty()


@pytest.mark.parametrize("again", [False, True], ids=["left", "started again"])
async def test_drain_ends_with_the_process_that_announced_it(rig: Rig, again: bool) -> None:
    leaving = await rig.worker("a")
    await rig.front.ready()
    announce_drain(leaving)
    await eventually(lambda: "a" in rig.engine.fleet.draining)
    await rig.crash(leaving)
    del rig.members.instances["a"]
    rig.members.changed()
    if again:
        await rig.worker("a")
    assert "a" not in rig.engine.fleet.draining
