"""Large requests enter one at a time, by turns of their tenants, and render apart from small ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_svc.api_server import large_lane
from frontend_svc.api_server.large_lane import (
    REQUEST_LOOP_S,
    Doors,
    LaneTurn,
    LargeLane,
    Pass,
    large_task,
    use_two_lanes,
)
from tailrace.tenancy import pace
from tailrace.tenancy.fair_queue import TenantQueueFull
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody be alone because this process waits for a core."""
    for module in (large_lane, pace):
        monkeypatch.setattr(module, "ALONE_AFTER_S", WAIT_S)


async def run_ready_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    lane = LargeLane(max_turn_s=WAIT_S)
    order: list[str] = []

    async def enter(tenant: str) -> None:
        turn = await lane.enter(tenant, 1.0, 0.0)
        order.append(tenant)
        turn.end()

    first = await lane.enter("a", 1.0, 0.0)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for tenant in "aaabb":
            group.create_task(enter(tenant))
        await run_ready_tasks()
        assert not order and len(lane) == 5
        first.end()
    assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


async def test_next_one_waits_until_others_had_most_of_the_event_loop() -> None:
    lane = LargeLane(max_turn_s=WAIT_S)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    (await lane.enter("a", 1.0, 0.01)).end()
    async with asyncio.timeout(WAIT_S):
        (await lane.enter("b", 1.0, 0.0)).end()
    assert loop.time() - began_s >= 0.1


async def test_sequences_are_submitted_one_by_one_with_time_in_between() -> None:
    lane = LargeLane(max_turn_s=WAIT_S)
    loop = asyncio.get_running_loop()
    turn = await lane.enter("a", 1.0, 0.0)
    began_s = loop.time()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for _ in range(11):
            group.create_task(turn.step())
    assert loop.time() - began_s >= 10 * 0.0012
    turn.end()


async def test_sequences_leave_more_time_once_a_small_request_has_come() -> None:
    lane = LargeLane(max_turn_s=WAIT_S)
    loop = asyncio.get_running_loop()
    turn = await lane.enter("a", 1.0, 0.0)
    lane.small_came()
    began_s = loop.time()
    async with asyncio.timeout(WAIT_S):
        for _ in range(11):
            await turn.step()
    assert loop.time() - began_s >= 10 * 0.006
    turn.end()


async def test_queue_of_a_tenant_is_bounded() -> None:
    lane = LargeLane(max_waiting=1, max_turn_s=WAIT_S)
    turn = await lane.enter("a", 1.0, 0.0)
    waiting = asyncio.create_task(lane.enter("a", 1.0, 0.0))
    await run_ready_tasks()
    assert lane.is_full("a") and not lane.is_full("b")
    with pytest.raises(TenantQueueFull):
        await lane.enter("a", 1.0, 0.0)
    turn.end()
    (await waiting).end()


async def test_turn_that_takes_too_long_is_over() -> None:
    lane = LargeLane(max_turn_s=0.01)
    first = await lane.enter("a", 1.0, 0.0)
    async with asyncio.timeout(WAIT_S):
        second = await lane.enter("b", 1.0, 0.0)
        # What ends late ends no other one's turn.
        third = asyncio.create_task(lane.enter("b", 1.0, 0.0))
        first.end()
        second.end()
        (await third).end()


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "cancel", "end", "run"]), st.integers(0, 6)), max_size=40)
)
def test_each_turn_is_taken_and_given_back_once(events: list[tuple[str, int]]) -> None:
    async def check() -> None:
        lane = LargeLane(max_turn_s=WAIT_S)
        tasks: list[asyncio.Task[LaneTurn]] = []
        ended: set[int] = set()
        for event, which in events:
            if event == "enter":
                tasks.append(asyncio.create_task(lane.enter("ab"[which % 2], 1.0, 0.0)))
            elif event == "run":
                await run_ready_tasks()
            elif which < len(tasks) and event == "cancel":
                tasks[which].cancel()
            elif which < len(tasks) and tasks[which].done() and not tasks[which].cancelled():
                tasks[which].result().end()
                ended.add(which)
            entered = [n for n, task in enumerate(tasks) if task.done() and not task.cancelled()]
            assert len([n for n in entered if n not in ended]) <= 1
        for _ in range(len(tasks) + 1):
            await asyncio.sleep(0)
            await run_ready_tasks()
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result().end()
        # Everyone who did not give up had a turn, and the lane is free.
        assert all(task.done() for task in tasks) and len(lane) == 0
        (await lane.enter("a", 1.0, 0.0)).end()

    asyncio.run(asyncio.wait_for(check(), WAIT_S))


async def test_small_requests_of_a_tenant_enter_one_by_one_and_hold_up_no_other_tenant() -> None:
    doors = Doors(longest_s=1_000.0)
    async with asyncio.timeout(WAIT_S):
        first = await doors.enter("busy")
        waiting = [asyncio.create_task(doors.enter("busy")) for _ in range(2)]
        await run_ready_tasks()
        (await doors.enter("other")).give_back()
        assert len(doors) == 2
        first.give_back()
        first.give_back()
        second = await waiting[0]
        assert len(doors) == 1 and not waiting[1].done()
        second.give_back()
        (await waiting[1]).give_back()
    assert len(doors) == 0


async def test_small_requests_of_one_tenant_leave_others_most_of_the_event_loop() -> None:
    doors = Doors()
    loop = asyncio.get_running_loop()

    async def enter_ten_times() -> float:
        began_s = loop.time()
        for _ in range(10):
            (await doors.enter("busy")).give_back()
        return loop.time() - began_s

    async with asyncio.timeout(WAIT_S):
        (await doors.enter("other")).give_back()
        # The first enters at once, and each of the others takes a quarter of the time since the one before.
        assert await enter_ten_times() >= 9 * REQUEST_LOOP_S / 0.25


async def test_tenant_alone_enters_without_pauses() -> None:
    doors = Doors()
    for _ in range(100):
        # Raised at the first step if the door is open: then entering waits for nothing.
        with pytest.raises(StopIteration) as entered:
            doors.enter("busy").send(None)
        entered.value.value.give_back()


async def test_small_request_that_waits_for_something_else_holds_up_nobody_for_long() -> None:
    doors = Doors()
    async with asyncio.timeout(WAIT_S):
        first = await doors.enter("busy")
        second = await doors.enter("busy")
    first.give_back()
    second.give_back()
    (await doors.enter("busy")).give_back()


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "cancel", "return", "run"]), st.integers(0, 6)), max_size=40)
)
def test_each_pass_is_given_back_once(events: list[tuple[str, int]]) -> None:
    async def check() -> None:
        doors = Doors()
        tasks: list[asyncio.Task[Pass]] = []
        for event, which in events:
            if event == "enter":
                tasks.append(asyncio.create_task(doors.enter("ab"[which % 2])))
            elif event == "run":
                await run_ready_tasks()
            elif which < len(tasks) and event == "cancel":
                tasks[which].cancel()
            elif which < len(tasks) and tasks[which].done() and not tasks[which].cancelled():
                tasks[which].result().give_back()
        # Everyone who did not give up enters, and the doors are free.
        for one in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(one, Pass):
                one.give_back()
        assert len(doors) == 0
        for tenant in "ab":
            (await doors.enter(tenant)).give_back()

    asyncio.run(asyncio.wait_for(check(), WAIT_S))


async def test_large_prompts_do_not_occupy_the_thread_of_small_ones() -> None:
    executor = ThreadPoolExecutor(1)
    use_two_lanes(executor)
    loop = asyncio.get_running_loop()
    go_on = threading.Event()
    token = large_task.set(True)
    large = [loop.run_in_executor(executor, go_on.wait, WAIT_S) for _ in range(3)]
    large_task.reset(token)
    try:
        async with asyncio.timeout(WAIT_S):
            assert await loop.run_in_executor(executor, lambda: 7) == 7
        assert not any(future.done() for future in large)
    finally:
        go_on.set()
    await asyncio.gather(*large)
    executor.shutdown()
