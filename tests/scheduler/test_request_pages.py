"""Pages of the scheduler's listing of requests."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

import grpc
import pytest

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.request_pages import PAGE_MAX, request_page
from tailrace.cluster import Arrival
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.service import tasks
from tailrace.v1.admin_pb2 import (
    REQUEST_ORDER_OLDEST,
    REQUEST_ORDER_UNSPECIFIED,
    ListRequestsReply,
    ListRequestsRequest,
    RequestOrder,
)
from tests.scheduler.facts import (
    ANSWERING,
    GONE,
    PREFILL,
    REASONING,
    event,
    members,
    report_to,
    request,
    set_members,
    steady,
)

NOW_S = 100.0


def fleet() -> ReportedCluster:
    """Return two instances: b0..b3 on b arrived before a0..a5 on a, of which every second one answers."""
    state = ReportedCluster()
    set_members(state, members("a", "b"), 0.0)
    for name, count, arrival_s in (("a", 6, 50.0), ("b", 4, 10.0)):
        rows = [request(f"{name}{i}", ANSWERING if i % 2 else REASONING) for i in range(count)]
        for i, row in enumerate(rows):
            row.arrival_s = arrival_s - i
        report_to(state, steady(name, rows), 0.0)
    return state


async def page(state: ReportedCluster, asked: ListRequestsRequest) -> tuple[list[str], ListRequestsReply]:
    """Return the ids on a page, and its reply."""
    reply = await request_page(state, asked, NOW_S)
    return [found.request_id for found in reply.requests], reply


async def all_pages(state: ReportedCluster, asked: ListRequestsRequest) -> list[list[str]]:
    """Return the ids on each page."""
    pages: list[list[str]] = []
    for _ in itertools.count():
        ids, reply = await page(state, asked)
        pages.append(ids)
        if not reply.next_page_token:
            return pages
        asked.page_token = reply.next_page_token
    raise AssertionError


async def test_without_a_page_size_there_is_one_page_with_all() -> None:
    ids, reply = await page(fleet(), ListRequestsRequest())
    assert ids == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2", "b3"]
    assert (reply.total_size, reply.next_page_token) == (10, "")


async def test_pages_by_instance() -> None:
    expected = [["a0", "a1", "a2", "a3"], ["a4", "a5", "b0", "b1"], ["b2", "b3"]]
    assert await all_pages(fleet(), ListRequestsRequest(page_size=4)) == expected


@pytest.mark.parametrize("size", [5, 10])
async def test_a_full_last_page_has_no_token(size: int) -> None:
    pages = await all_pages(fleet(), ListRequestsRequest(page_size=size))
    assert [len(ids) for ids in pages] == [size] * (10 // size)


async def test_pages_by_age() -> None:
    asked = ListRequestsRequest(page_size=3, order=REQUEST_ORDER_OLDEST)
    expected = [["b3", "b2", "b1"], ["b0", "a5", "a4"], ["a3", "a2", "a1"], ["a0"]]
    assert await all_pages(fleet(), asked) == expected


async def test_filters_and_how_many_match() -> None:
    state = fleet()
    ids, reply = await page(state, ListRequestsRequest(phase=ANSWERING, page_size=2))
    assert (ids, reply.total_size) == (["a1", "a3"], 5)
    ids, reply = await page(state, ListRequestsRequest(instance_id="b", phase=REASONING, page_size=1))
    assert (ids, reply.total_size) == (["b0"], 2)
    asked = ListRequestsRequest(instance_id="b", order=REQUEST_ORDER_OLDEST, page_size=1)
    ids, reply = await page(state, asked)
    assert (ids, reply.total_size) == (["b3"], 4)
    ids, reply = await page(state, ListRequestsRequest(phase=PREFILL, page_size=2))
    assert (ids, reply.total_size, reply.next_page_token) == ([], 0, "")


async def test_requests_that_come_and_go_between_pages_shift_nothing() -> None:
    state = fleet()
    asked = ListRequestsRequest(page_size=4)
    _, reply = await page(state, asked)
    for gone in ("a0", "a3"):
        report_to(state, event("a", gone, GONE), 1.0)
    report_to(state, event("a", "a00", REASONING), 1.0)
    asked.page_token = reply.next_page_token
    ids, reply = await page(state, asked)
    assert (ids, reply.total_size) == (["a4", "a5", "b0", "b1"], 9)


async def test_the_instance_at_the_end_of_a_page_may_leave() -> None:
    state = fleet()
    asked = ListRequestsRequest(page_size=4)
    _, reply = await page(state, asked)
    set_members(state, members("b"), 1.0)
    asked.page_token = reply.next_page_token
    ids, _ = await page(state, asked)
    assert ids == ["b0", "b1", "b2", "b3"]


async def test_placements_that_are_not_reported_yet_are_the_youngest() -> None:
    state = fleet()
    state.place(Arrival("c", seq=1, prompt_tokens=1, max_tokens=1), "b", 1.0)
    ids, reply = await page(state, ListRequestsRequest(order=REQUEST_ORDER_OLDEST))
    assert (ids[0], ids[-1], reply.total_size) == ("b3", "c", 11)
    ids, _ = await page(state, ListRequestsRequest(phase=PREFILL))
    assert ids == ["c"]


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("order", [REQUEST_ORDER_UNSPECIFIED, REQUEST_ORDER_OLDEST])
async def test_a_request_that_moves_while_a_page_is_made_is_listed_once(
    monkeypatch: pytest.MonkeyPatch, order: RequestOrder.ValueType, turns: int
) -> None:
    monkeypatch.setattr(tasks, "_SLICE_S", -1.0)
    state = fleet()
    asked = asyncio.create_task(page(state, ListRequestsRequest(order=order)))
    # One turn reads one instance, the first one of the page first.
    for _ in range(turns):
        await asyncio.sleep(0)
    report_to(state, event("b", "a0", REASONING, epoch=1), 1.0)
    ids, _ = await asked
    assert sorted(ids) == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2", "b3"]


async def test_a_request_that_leaves_the_phase_while_a_page_is_made_is_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_SLICE_S", -1.0)
    state = fleet()
    asked = asyncio.create_task(page(state, ListRequestsRequest(phase=REASONING)))
    await asyncio.sleep(0)
    report_to(state, event("a", "a0", ANSWERING), 1.0)
    ids, _ = await asked
    assert ids == ["a2", "a4", "b0", "b2"]


async def test_a_request_that_leaves_the_instance_while_a_page_is_made_is_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_SLICE_S", -1.0)
    state = fleet()
    asked = asyncio.create_task(page(state, ListRequestsRequest(instance_id="a")))
    await asyncio.sleep(0)
    report_to(state, event("b", "a0", REASONING, epoch=1), 1.0)
    ids, _ = await asked
    assert ids == ["a1", "a2", "a3", "a4", "a5"]


@pytest.mark.parametrize("size", [1, 3, 7, 100, 1_000])
async def test_pages_by_age_of_many_instances(size: int) -> None:
    draw = Random(5)
    state = ReportedCluster()
    set_members(state, members(*"abcdefgh"), 0.0)
    expected: list[tuple[float, str]] = []
    for name in "abcdefgh":
        rows = [request(f"{name}{i:02}") for i in range(25)]
        for row in rows:
            # Several arrive at the same time.
            row.arrival_s = float(draw.randint(1, 40))
            expected.append((row.arrival_s, row.request_id))
        report_to(state, steady(name, rows), 0.0)
    pages = await all_pages(state, ListRequestsRequest(page_size=size, order=REQUEST_ORDER_OLDEST))
    assert [name for ids in pages for name in ids] == [name for _, name in sorted(expected)]


async def test_a_page_has_a_limit_of_its_own() -> None:
    state = ReportedCluster()
    set_members(state, members("a"), 0.0)
    report_to(state, steady("a", [request(f"r{i:05}") for i in range(PAGE_MAX + 2)]), 0.0)
    pages = await all_pages(state, ListRequestsRequest(page_size=10 * PAGE_MAX))
    assert [len(ids) for ids in pages] == [PAGE_MAX, 2]


async def test_wrong_requests_are_refused() -> None:
    state = fleet()
    _, first = await page(state, ListRequestsRequest(page_size=1))
    token = first.next_page_token
    bad = [
        (ListRequestsRequest(instance_id="x"), "instance_id: no instance 'x'"),
        (ListRequestsRequest(phase=9), "phase: there is no phase 9"),  # type: ignore[arg-type]
        (ListRequestsRequest(order=9), "order: there is no order 9"),  # type: ignore[arg-type]
        (ListRequestsRequest(page_token="x"), "page_token: must be"),
        (ListRequestsRequest(page_token="é"), "page_token: must be"),
        (ListRequestsRequest(page_token="e30="), "page_token: must be"),
        (
            ListRequestsRequest(page_token=token, instance_id="a"),
            "page_token: belongs to a listing with another",
        ),
        (
            ListRequestsRequest(page_token=token, phase=REASONING),
            "page_token: belongs to a listing with another",
        ),
        (
            ListRequestsRequest(page_token=token, order=REQUEST_ORDER_OLDEST),
            "page_token: belongs to a listing",
        ),
    ]
    for asked, details in bad:
        with pytest.raises(AdminError) as caught:
            await request_page(state, asked, NOW_S)
        assert details in caught.value.details
        unknown = asked.instance_id == "x"
        expected = grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code is expected
