"""Streams that stand still: their owner is asked, and they are recovered when it does not have them."""

from __future__ import annotations

import pytest

from frontend_svc import liveness as liveness_module
from frontend_svc.liveness import QUERY_AFTER_S, QUERY_AFTER_STEPS, Liveness
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2
from tests.frontend.conftest import Rig
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, outputs


class Asked:
    """An outbox that remembers whom it asked about what."""

    def __init__(self) -> None:
        self.queries: list[tuple[str, list[int], list[int]]] = []

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        query = message.held_query
        self.queries.append((instance_id, list(query.handles), list(query.epochs)))
        return True

    def attached(self) -> list[str]:
        return []

    def max_message_bytes(self, instance_id: str) -> int:
        return 1 << 20


def owned(table: StreamTable, name: str, instance_id: str) -> Stream:
    stream = table.open(name)
    table.assign(stream, instance_id)
    return stream


def test_only_what_stands_still_for_long_is_asked_for_and_each_owner_at_once() -> None:
    table, asked = StreamTable(), Asked()
    liveness = Liveness(table, asked)
    still, other, moving = owned(table, "r", "a"), owned(table, "s", "a"), owned(table, "t", "b")
    table.open("between instances")
    for second in range(int(QUERY_AFTER_S) + 1):
        moving.token_ids.append(1)
        liveness.tick(float(second))
    assert asked.queries == []
    liveness.tick(QUERY_AFTER_S + 0.5)
    assert asked.queries == [("a", [still.handle, other.handle], [0, 0])]
    # Not again at once, but again after the same time; what has got on meanwhile is not in doubt any more.
    asked.queries.clear()
    liveness.tick(QUERY_AFTER_S + 1.0)
    assert asked.queries == []
    other.token_ids.append(1)
    moving.token_ids.append(1)
    liveness.tick(2 * QUERY_AFTER_S + 1.0)
    assert asked.queries == [("a", [still.handle], [0])]


def test_a_stream_that_changed_its_owner_has_the_whole_time_again() -> None:
    table, asked = StreamTable(), Asked()
    liveness = Liveness(table, asked)
    stream = owned(table, "r", "a")
    liveness.tick(0.0)
    table.orphan(stream)
    table.assign(stream, "b")
    liveness.tick(QUERY_AFTER_S + 1.0)
    assert asked.queries == []
    liveness.tick(2 * QUERY_AFTER_S + 1.5)
    assert asked.queries == [("b", [stream.handle], [1])]


def test_an_instance_of_long_steps_has_more_patience() -> None:
    table, asked = StreamTable(), Asked()
    liveness = Liveness(table, asked)
    stream = owned(table, "r", "slow")
    # A second a step; not all steps had outputs for this front end.
    for step in range(0, 40, 2):
        liveness.step_received("slow", step, float(step))
    liveness.tick(0.0)
    liveness.tick(QUERY_AFTER_STEPS - 1.0)
    assert asked.queries == []
    liveness.tick(QUERY_AFTER_STEPS + 1.0)
    assert asked.queries == [("slow", [stream.handle], [0])]
    # Another process by that name counts from the beginning.
    liveness.step_received("slow", 0, 100.0)
    liveness.tick(100.0 + QUERY_AFTER_S)
    assert len(asked.queries) == 2


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "QUERY_AFTER_S", 0.1)


@pytest.mark.usefixtures("soon")
async def test_a_stream_that_its_owner_does_not_have_goes_on_elsewhere(rig: Rig) -> None:
    worker, other = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    worker.say(outputs(submit, [10], 0, PREFILL_DONE))
    await rig.front.tokens_of("r", 1)
    query = (await worker.expect("held_query")).held_query
    assert (list(query.handles), list(query.epochs)) == ([submit.handle], [0])
    # It has it: nothing happens, but it is asked again.
    worker.say(worker_pb2.AttachDown(held_reply=worker_pb2.HeldReply()))
    await worker.expect("held_query")
    # What it says of another epoch, or of somebody else's stream, is not its to say.
    missing = worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[5])
    worker.say(worker_pb2.AttachDown(held_reply=missing))
    other.say(
        worker_pb2.AttachDown(
            held_reply=worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
        )
    )
    await worker.expect("held_query")
    worker.say(
        worker_pb2.AttachDown(
            held_reply=worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
        )
    )
    again = await other.submitted()
    assert (again.request_id, again.epoch, list(again.output_token_ids)) == ("r", 1, [10])
    other.say(outputs(again, [11], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11]
    assert rig.count("recoveries_total", cause="missing") == 1


@pytest.mark.usefixtures("soon")
async def test_a_token_that_came_before_the_answer_counts(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    await worker.expect("held_query")
    worker.say(outputs(submit, [10], 0, FINISHED))
    missing = worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
    worker.say(worker_pb2.AttachDown(held_reply=missing))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10]
    assert rig.count("recoveries_total", cause="missing") == 0
