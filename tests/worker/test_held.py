"""A worker's reply to a front end that asks whether it still has its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tailrace.v1 import worker_pb2
from tests.waiting import WAIT_S
from tests.worker.simulated import SMALL, request_frames
from tests.worker.test_attach import Attached, Worker, attached
from worker_agent.engine.base import Held, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated import SimulatedEngine
from worker_agent.held import HeldQueries


async def ask(queries: HeldQueries, front: Attached, *handles: int, epoch: int = 0) -> list[int]:
    """Query these handles and return the missing ones."""
    # Discard the previous reply.
    await queries.close()
    await asyncio.sleep(0)
    while not front.peer.down.empty():
        front.peer.down.get_nowait()
    query = worker_pb2.HeldQuery(handles=handles, epochs=[epoch] * len(handles))
    queries.answer(front.front_end, query)
    async with asyncio.timeout(WAIT_S):
        while True:
            message = await front.peer.down.get()
            if message.HasField("held_reply"):
                assert list(message.held_reply.missing_epochs) == [epoch] * len(
                    message.held_reply.missing_handles
                )
                return list(message.held_reply.missing_handles)


async def test_requests_unknown_to_the_engine_are_missing() -> None:
    worker = Worker()
    engine = SimulatedEngine(SMALL)
    # No request ends during the test.
    engine.faults.hang = True
    await engine.start(worker.sink)
    exporting: set[RequestKey] = set()
    importing: set[RequestKey] = set()
    failed_because: list[RequestKey] = []
    queries = HeldQueries(
        engine, worker.running, exporting.__contains__, importing.__contains__, failed_because.append
    )
    front = await attached(worker, "a")
    for handle in (1, 2, 3):
        key, name = RequestKey(0, handle), f"r{handle}"
        engine.submit(Submission(key, name, 0, request_frames(name, [65, 66]), frontend_id="a"))
        worker.running.add(key, name, "a", 0)
    assert await ask(queries, front, 1, 2, 3, 9) == [9]
    # With another epoch it is a different request.
    assert await ask(queries, front, 1, epoch=1) == [1]
    engine.abort([RequestKey(0, 2)])
    assert await ask(queries, front, 1, 2, 3) == [2]
    assert failed_because == [RequestKey(0, 2)]
    # Being imported: the engine does not have it yet.
    importing.add(RequestKey(0, 2))
    assert await ask(queries, front, 1, 2, 3) == []
    await queries.close()
    await engine.stop()
    front.peer.up.put_nowait(None)
    await front.served


async def test_request_paused_for_an_ended_export_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine, key = Worker(), SimulatedEngine(SMALL), RequestKey(0, 1)

    async def find_held(keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        return {key: Held(0, paused=True)}

    monkeypatch.setattr(engine, "find_held", find_held)
    exporting = {key}
    queries = HeldQueries(
        engine, worker.running, exporting.__contains__, lambda key: False, worker.failed_because.append
    )
    front = await attached(worker, "a")
    assert await ask(queries, front, 1) == []
    exporting.clear()
    assert await ask(queries, front, 1) == [1]
    front.peer.up.put_nowait(None)
    await front.served


@pytest.mark.parametrize("held", [{}, {RequestKey(0, 1): Held(0, paused=True)}], ids=["in", "out"])
async def test_request_whose_transfer_ends_while_the_engine_answers_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, held: dict[RequestKey, Held]
) -> None:
    """A pull or import has just submitted it, or an export has just resumed it: after the engine looked."""
    worker, engine, key = Worker(), SimulatedEngine(SMALL), RequestKey(0, 1)
    moving = {key}

    async def find_held(keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        moving.clear()
        return held

    monkeypatch.setattr(engine, "find_held", find_held)
    nothing: set[RequestKey] = set()
    exporting, importing = (moving, nothing) if held else (nothing, moving)
    queries = HeldQueries(
        engine, worker.running, exporting.__contains__, importing.__contains__, worker.failed_because.append
    )
    front = await attached(worker, "a")
    assert await ask(queries, front, 1) == []
    # If it is still not there the next time, it is.
    assert await ask(queries, front, 1) == [1]
    front.peer.up.put_nowait(None)
    await front.served


async def test_unresponsive_engine_reports_no_request_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, engine = Worker(), SimulatedEngine(SMALL)
    answers = 0

    async def find_held(keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        nonlocal answers
        answers += 1
        if answers == 1:
            raise EngineRefusal("in a long step")
        return {}

    monkeypatch.setattr(engine, "find_held", find_held)
    queries = HeldQueries(
        engine, worker.running, lambda key: False, lambda key: False, worker.failed_because.append
    )
    front = await attached(worker, "a")
    queries.answer(front.front_end, worker_pb2.HeldQuery(handles=[1], epochs=[0]))
    # Only one query at a time: this one is skipped.
    queries.answer(front.front_end, worker_pb2.HeldQuery(handles=[1], epochs=[0]))
    for _ in range(3):
        await asyncio.sleep(0)
    assert front.peer.down.empty() and answers == 1
    assert await ask(queries, front, 1) == [1]
    front.peer.up.put_nowait(None)
    await front.served
