"""The fair gate: new requests wait for their tenant's turn while enough prompts are in progress."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from frontend_svc.admission import NO_INSTANCE, NO_TURN, TENANT_FULL, Refusal, Refused
from frontend_svc.fair_gate import MAX_TENANTS, OTHERS, FairGate, FairMetrics
from frontend_svc.settings import Limits
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.tasks import cancel
from tailrace.tenancy.keys import SHARE_HEADER, Share
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import FinishReason
from tests.frontend.conftest import Rig, eventually, place_wait_ends
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, ScriptedWorker, outputs

PROMPT = [1] * 6
# Two prompts fit into the backlog, further ones wait.
TWO = Limits(fair_backlog_tokens=10)
SHORT = Limits(fair_backlog_tokens=10, max_waiting=2)

two_prompt_limit = pytest.mark.parametrize("limits", [TWO])


async def send_request(
    rig: Rig, request_id: str, tenant: str, weight: float = 1.0, priority: int = 0
) -> None:
    share = {SHARE_HEADER: Share(tenant, weight).encode()}
    await rig.front.add(request_id, PROMPT, priority=priority, trace_headers=share)


async def burst(rig: Rig, worker: ScriptedWorker, waiting: int) -> list[worker_pb2.Submit]:
    """Send requests of tenant a; the first two are placed at once."""
    for number in range(2 + waiting):
        await send_request(rig, f"a{number}", "a")
    submits = [await worker.submitted() for _ in range(2)]
    await eventually(lambda: waiting_requests(rig, "a") == waiting)
    assert worker.received.empty()
    return submits


def waiting_requests(rig: Rig, tenant: str) -> float:
    return rig.count("fair_waiting", tenant=tenant)


def first_token(worker: ScriptedWorker, submit: worker_pb2.Submit) -> None:
    worker.send(outputs(submit, [7], 0, PREFILL_DONE))


async def refusal_of(rig: Rig, request_id: str) -> Refusal | None:
    end = await rig.front.end_of(request_id)
    assert end.finish_reason == FinishReason.ERROR
    return Refusal.decode(end.stop_reason)


@two_prompt_limit
async def test_other_tenant_is_next_after_a_burst(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    running = await burst(rig, worker, waiting=4)
    assert rig.count("fair_backlog_tokens") == 12 and rig.count("fair_backlog_limit_tokens") == 10
    await send_request(rig, "b0", "b")
    await eventually(lambda: waiting_requests(rig, "b") == 1)
    # A request leaves the backlog with its first token or its end.
    first_token(worker, running[0])
    assert (await worker.submitted()).request_id == "b0"
    worker.send(outputs(running[1], [7], 0, FINISHED))
    assert (await worker.submitted()).request_id == "a2"
    assert waiting_requests(rig, "a") == 3 and waiting_requests(rig, "b") == 0
    assert rig.count("fair_wait_seconds_count") == 4


@two_prompt_limit
async def test_lower_priority_value_goes_first_within_a_tenant(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    running = await burst(rig, worker, waiting=2)
    await send_request(rig, "urgent", "a", priority=-1)
    await eventually(lambda: waiting_requests(rig, "a") == 3)
    first_token(worker, running[0])
    assert (await worker.submitted()).request_id == "urgent"


@place_wait_ends
@two_prompt_limit
async def test_request_that_gets_no_turn_is_refused_at_its_deadline(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    await burst(rig, worker, waiting=1)
    assert await refusal_of(rig, "a2") == NO_TURN
    assert rig.count("fair_refused_total", reason="deadline") == 1
    assert rig.count("refused_requests_total", status="503") == 1
    assert len(rig.engine.table) == 2 and worker.received.empty()


@place_wait_ends
@two_prompt_limit
async def test_no_request_gets_a_turn_without_an_instance(rig: Rig) -> None:
    await rig.worker("w")
    await rig.front.ready()
    rig.members.draining = frozenset({"w"})
    rig.members.changed()
    await send_request(rig, "r", "a")
    assert await refusal_of(rig, "r") == NO_INSTANCE


@two_prompt_limit
async def test_request_gets_its_turn_with_the_first_instance(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    rig.members.draining = frozenset({"w"})
    rig.members.changed()
    await send_request(rig, "s", "a")
    await eventually(lambda: waiting_requests(rig, "a") == 1)
    rig.members.draining = frozenset()
    rig.members.changed()
    assert (await worker.submitted()).request_id == "s"


@pytest.mark.parametrize("limits", [SHORT])
async def test_full_queue_affects_only_its_tenant(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    running = await burst(rig, worker, waiting=2)
    await send_request(rig, "a4", "a")
    assert await refusal_of(rig, "a4") == TENANT_FULL
    assert rig.count("fair_refused_total", reason="full") == 1
    await send_request(rig, "b0", "b")
    await eventually(lambda: waiting_requests(rig, "b") == 1)
    first_token(worker, running[0])
    assert (await worker.submitted()).request_id == "b0"


@two_prompt_limit
async def test_aborted_request_releases_its_turn(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    await burst(rig, worker, waiting=2)
    # One that waits, and one that frees its part of the backlog.
    await rig.front.abort("a2")
    await eventually(lambda: waiting_requests(rig, "a") == 1)
    await rig.front.abort("a0")
    assert (await worker.submitted()).request_id == "a3"
    await rig.front.abort("a1", "a3")
    await eventually(lambda: rig.count("fair_backlog_tokens") == 0)
    assert len(rig.engine.table) == 0


@two_prompt_limit
async def test_request_that_lost_its_instance_bypasses_the_gate(rig: Rig) -> None:
    worker = await rig.worker("v")
    await rig.front.ready()
    await burst(rig, worker, waiting=2)
    other = await rig.worker("w")
    # The second instance raises the limit, so the waiting requests are placed.
    assert {(await other.submitted()).request_id for _ in range(2)} == {"a2", "a3"}
    await send_request(rig, "b0", "b")
    await eventually(lambda: waiting_requests(rig, "b") == 1)
    await rig.crash(worker)
    # The limit is halved and the gate closed, but requests of the lost instance are placed at once.
    moved = [await other.submitted() for _ in range(2)]
    assert {submit.request_id for submit in moved} == {"a0", "a1"}
    assert other.received.empty() and rig.count("fair_backlog_tokens") == 24


@two_prompt_limit
async def test_requests_beyond_the_unplaced_limit_are_refused(rig: Rig) -> None:
    worker = await rig.worker("w")
    await rig.front.ready()
    await burst(rig, worker, waiting=1)
    rig.engine.requests._limits = Limits(fair_backlog_tokens=10, max_unplaced=1)
    await send_request(rig, "b0", "b")
    assert await refusal_of(rig, "b0") == NO_INSTANCE


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(0, 3), st.integers(0, 30)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("instances"), st.integers(0, 3), st.just(0)),
    ),
    max_size=60,
)


@given(_ACTIONS)
def test_backlog_is_bounded_and_work_conserving(actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(_run_actions(actions))


async def _run_actions(actions: list[tuple[str, int, int]]) -> None:
    table, in_progress, refused = StreamTable(), dict[int, int](), list[int]()

    def admitted(seconds: float) -> None:
        # Only while the backlog was below its limit.
        newest = list(gate._admitted.values())[-1]
        assert gate.backlog_tokens - newest < gate.limit_tokens

    gate = FairGate(10, 5, 60.0, admitted)

    async def turn(stream: Stream, share: Share) -> None:
        try:
            await gate.turn(stream, share, 0)
        except Refused as error:
            assert error.refusal is TENANT_FULL and gate.waiting()[share.tenant] == 5
            refused.append(stream.handle)
        else:
            in_progress[stream.handle] = max(1, stream.prompt_tokens)

    async def settle() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    turns: dict[int, asyncio.Task[None]] = {}
    try:
        for action, number, tokens in (*actions, ("instances", 1, 0)):
            if action == "enqueue":
                stream = table.open(f"r{len(table)}", prompt_tokens=tokens)
                share = Share(f"t{number}", number + 0.5)
                turns[stream.handle] = asyncio.create_task(turn(stream, share))
            elif action == "release" and turns:
                # Of a request that waits or runs, or was refused.
                handle = list(turns)[number % len(turns)]
                await cancel(turns.pop(handle))
                in_progress.pop(handle, None)
                gate.release(handle)
            elif action == "instances":
                gate.set_instances(number)
            await settle()
            assert gate.backlog_tokens == sum(in_progress.values())
            assert not len(gate) or gate.backlog_tokens >= gate.limit_tokens
        # Every request gets its turn in the end.
        while len(gate):
            handle = next(iter(in_progress))
            del in_progress[handle]
            gate.release(handle)
            await settle()
        assert all(task.done() and task.exception() is None for task in turns.values())
    finally:
        gate.close()
        await cancel(*turns.values())


async def test_tenants_beyond_the_limit_share_one_metric_series() -> None:
    registry, table = CollectorRegistry(), StreamTable()
    gate = FairGate(1, 10, 60.0, lambda seconds: None)
    FairMetrics(registry, gate)
    turns = []
    try:
        for number in range(MAX_TENANTS + 7):
            stream = table.open(f"r{number}", prompt_tokens=3)
            turns.append(asyncio.create_task(gate.turn(stream, Share(f"t{number}"), 0)))
        await asyncio.sleep(0)
        counts = {
            sample.labels["tenant"]: sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "tailrace_frontend_fair_waiting"
        }
        assert len(counts) == MAX_TENANTS + 1 and counts[OTHERS] == 7
    finally:
        gate.close()
        await cancel(*turns)
