"""Stalled streams: their owner is queried, and they are recovered if it does not have them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc import liveness as liveness_module
from frontend_svc.liveness import QUERY_AFTER_S, QUERY_AFTER_STEPS, QUERY_LATEST_S, Liveness
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2
from tests.frontend.conftest import Rig
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, outputs


class QueryOutbox:
    """Outbox that records the queries to each instance."""

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


def test_only_stalled_streams_are_queried_with_one_query_per_owner() -> None:
    table, outbox = StreamTable(), QueryOutbox()
    liveness = Liveness(table, outbox)
    stalled, other, moving = owned(table, "r", "a"), owned(table, "s", "a"), owned(table, "t", "b")
    table.open("between instances")
    for second in range(int(QUERY_AFTER_S) + 1):
        moving.token_ids.append(1)
        liveness.tick(float(second))
    assert outbox.queries == []
    liveness.tick(QUERY_AFTER_S + 0.5)
    assert outbox.queries == [("a", [stalled.handle, other.handle], [0, 0])]
    # Repeated after the same time, without streams that have made progress meanwhile.
    outbox.queries.clear()
    liveness.tick(QUERY_AFTER_S + 1.0)
    assert outbox.queries == []
    other.token_ids.append(1)
    moving.token_ids.append(1)
    liveness.tick(2 * QUERY_AFTER_S + 1.0)
    assert outbox.queries == [("a", [stalled.handle], [0])]


def test_timer_restarts_when_a_stream_changes_its_owner() -> None:
    table, outbox = StreamTable(), QueryOutbox()
    liveness = Liveness(table, outbox)
    stream = owned(table, "r", "a")
    liveness.tick(0.0)
    table.orphan(stream)
    table.assign(stream, "b")
    liveness.tick(QUERY_AFTER_S + 1.0)
    assert outbox.queries == []
    liveness.tick(2 * QUERY_AFTER_S + 1.5)
    assert outbox.queries == [("b", [stream.handle], [1])]


def test_timeout_is_longer_for_an_instance_with_long_steps() -> None:
    table, outbox = StreamTable(), QueryOutbox()
    liveness = Liveness(table, outbox)
    stream = owned(table, "r", "slow")
    # Half a second per step; no step has outputs for this front end.
    for second in range(QUERY_AFTER_STEPS // 2 + 1):
        liveness.heartbeat_received("slow", 2 * second, True, float(second))
        assert outbox.queries == []
        liveness.tick(float(second))
    assert outbox.queries == [("slow", [stream.handle], [0])]
    # A new process with the same name counts steps from 0.
    liveness.lost("slow")
    liveness.step_received("slow", 0, 100.0)
    liveness.tick(100.0 + QUERY_AFTER_S)
    assert len(outbox.queries) == 2


def test_steps_that_take_for_ever_postpone_a_query_for_a_minute_at_most() -> None:
    table, outbox = StreamTable(), QueryOutbox()
    liveness = Liveness(table, outbox)
    owned(table, "r", "a")
    for second in range(int(QUERY_LATEST_S) + 1):
        liveness.heartbeat_received("a", 7, True, float(second))
        liveness.tick(float(second))
    assert outbox.queries == []
    liveness.tick(QUERY_LATEST_S + 0.5)
    assert len(outbox.queries) == 1


@settings(deadline=None)
@given(
    st.lists(
        # Idle for so many seconds, then so many steps, each of so many seconds.
        st.tuples(st.floats(0.0, 10_000.0), st.integers(1, 80), st.floats(0.001, 3.0)),
        min_size=1,
        max_size=5,
    )
)
def test_stream_that_is_lost_after_any_gap_is_asked_for_in_time(
    history: list[tuple[float, int, float]],
) -> None:
    """The worker runs another front end's requests all the time, or none; then it has lost the stream."""
    table, outbox = StreamTable(), QueryOutbox()
    liveness, now_s, step = Liveness(table, outbox), 0.0, 0
    stream = owned(table, "r", "a")

    def run(seconds: float, step_s: float, lost: bool) -> float:
        """Run a virtual worker; return when the owner was asked, or when the time was over."""
        nonlocal now_s, step
        end_s, due_s, beat_s = now_s + seconds, now_s + step_s, now_s
        while now_s < end_s and not outbox.queries:
            now_s = min(due_s, beat_s, end_s)
            if now_s >= due_s:
                step, due_s = step + 1, now_s + step_s
                if not lost:
                    stream.token_ids.append(1)
                    liveness.step_received("a", step, now_s)
            if now_s >= beat_s:
                beat_s = now_s + 0.5
                liveness.heartbeat_received("a", step, step_s < inf, now_s)
                liveness.tick(now_s)
        return now_s

    for idle_s, steps, step_s in history:
        # As long as it has nothing of this front end, nothing is asked.
        now_s += idle_s
        table.orphan(stream)
        table.assign(stream, "a")
        run(steps * step_s, step_s, lost=False)
        assert outbox.queries == []
    for step_s, limit_s in ((inf, QUERY_AFTER_S), (0.5, QUERY_AFTER_STEPS / 2), (3.0, QUERY_LATEST_S)):
        lost_s = now_s
        assert run(1_000.0, step_s, lost=True) - lost_s <= limit_s + 4.0
        assert [query[1] for query in outbox.queries] == [[stream.handle]]
        outbox.queries.clear()


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "QUERY_AFTER_S", 0.1)


@pytest.mark.usefixtures("short_timeout")
async def test_stream_missing_at_its_owner_is_recovered_elsewhere(rig: Rig) -> None:
    worker, other = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    worker.send(outputs(submit, [10], 0, PREFILL_DONE))
    await rig.front.tokens_of("r", 1)
    query = (await worker.expect("held_query")).held_query
    assert (list(query.handles), list(query.epochs)) == ([submit.handle], [0])
    # The owner has it: nothing changes, and it is queried again.
    worker.send(worker_pb2.AttachDown(held_reply=worker_pb2.HeldReply()))
    await worker.expect("held_query")
    # Replies about another epoch or about another instance's stream are ignored.
    missing = worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[5])
    worker.send(worker_pb2.AttachDown(held_reply=missing))
    other.send(
        worker_pb2.AttachDown(
            held_reply=worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
        )
    )
    await worker.expect("held_query")
    worker.send(
        worker_pb2.AttachDown(
            held_reply=worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
        )
    )
    again = await other.submitted()
    assert (again.request_id, again.epoch, list(again.output_token_ids)) == ("r", 1, [10])
    other.send(outputs(again, [11], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10, 11]
    assert rig.count("recoveries_total", cause="missing") == 1


@pytest.mark.usefixtures("short_timeout")
async def test_token_received_before_the_reply_counts_as_progress(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    await worker.expect("held_query")
    worker.send(outputs(submit, [10], 0, FINISHED))
    missing = worker_pb2.HeldReply(missing_handles=[submit.handle], missing_epochs=[0])
    worker.send(worker_pb2.AttachDown(held_reply=missing))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [10]
    assert rig.count("recoveries_total", cause="missing") == 0
