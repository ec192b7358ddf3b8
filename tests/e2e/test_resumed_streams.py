"""Streams outlive their front end: killed under fifty, all clients get the rest from the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import httpx
import pytest

from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.processes import wait_until
from tests.e2e.resuming import Received, read_events, stream

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]

STREAMS = 50
FEW = 5
CHAT = "/v1/chat/completions"
KEEP = ["--keep-answers", "60"]


class Enough(Exception):
    """A client has read all that it wants."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two simulated workers behind two front ends that keep answers."""
    fleet = Fleet(tmp_path_factory.mktemp("answers"), "simulated")
    try:
        fleet.start_control()
        for name in ("w0", "w1"):
            fleet.start_worker(name, wait=False)
        for name in FRONT_ENDS:
            fleet.start_frontend(name=name, options=KEEP, wait=False)
        for name in FRONT_ENDS:
            fleet.wait_frontend(name)
        fleet.wait_instances(("w0", "w1"))
        yield fleet
    finally:
        fleet.close()


FRONT_ENDS = ("f0", "f1")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """Of both front ends, which are there."""
    fleet.mend()
    for name in FRONT_ENDS:
        fleet.wait_frontend(name)
    wait_until(
        lambda: all(fleet.metric(name, "tailrace_frontend_answer_peers") == 1 for name in FRONT_ENDS),
        "the front ends to know each other",
    )
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        yield client


def body(number: int, tokens: int = 120) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is {number} and {number + 1}?"}],
        "stream": True,
        "temperature": 0 if number % 2 else 1,
        "seed": number,
        "max_tokens": tokens + 100,
        "min_tokens": tokens,
        "logprobs": number % 5 == 0,
        "stream_options": {"include_usage": True},
    }


async def leave_after(
    client: httpx.AsyncClient, url: str, asked: dict[str, object], events: int, headers: dict[str, str]
) -> Received:
    """A client whose connection ends after so many events."""
    received = Received()
    async with client.stream("POST", f"{url}{CHAT}", json=asked, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for event_id, data in read_events(answer):
            received.ids.append(event_id)
            received.events.append(data)
            if len(received.events) == events:
                break
    return received


def error(answer: httpx.Response) -> tuple[int, str]:
    """Status and kind, of an error object that must be whole."""
    said = answer.json()["error"]
    assert said.keys() == {"message", "type", "param", "code"} and said["message"]
    assert said["code"] == answer.status_code
    return answer.status_code, said["type"]


@pytest.mark.parametrize("then", FRONT_ENDS)
async def test_goes_on_where_its_client_comes_back(
    fleet: Fleet, client: httpx.AsyncClient, then: str
) -> None:
    first, asked = fleet.urls["f0"], body(7)
    undisturbed = await stream(client, [first], asked, Received())
    received = await leave_after(client, first, asked, 20, {})
    # Nobody reads it: its KV is freed, and it is computed anew when somebody does.
    fleet.wait_idle()
    resumed = await stream(client, [fleet.urls[then]], asked, received)
    assert resumed.same(undisturbed)
    # Once more, from the start of the log, though all of it has been told.
    again = Received(undisturbed.events[:1], resumed.ids[:1])
    assert (await stream(client, [first], asked, again)).same(undisturbed)


@pytest.mark.slow
async def test_a_key_gets_the_whole_answer_anywhere(fleet: Fleet, client: httpx.AsyncClient) -> None:
    asked, key = body(8), {"idempotency-key": "key 8"}
    undisturbed = await stream(client, [fleet.urls["f1"]], asked, Received())
    await leave_after(client, fleet.urls["f0"], asked, 20, key)
    for name in ("f1", "f0", "f0"):
        answer = await stream(client, [fleet.urls[name]], asked, Received(), headers=key)
        assert answer.same(undisturbed)


async def test_not_streamed_it_is_answered_once(fleet: Fleet, client: httpx.AsyncClient) -> None:
    asked = {**body(9), "stream": False, "stream_options": None, "n": 2, "seed": None, "temperature": 1}
    key = {"idempotency-key": "key 9"}

    def tokens() -> float:
        return sum(fleet.metric(name, "tailrace_frontend_tokens_total") for name in FRONT_ENDS)

    first = await client.post(f"{fleet.urls['f0']}{CHAT}", json=asked, headers=key)
    assert first.status_code == 200 and len(first.json()["choices"]) == 2
    made = tokens()
    for name in ("f1", "f0"):
        again = await client.post(f"{fleet.urls[name]}{CHAT}", json=asked, headers=key)
        assert (again.status_code, again.content) == (200, first.content)
    assert tokens() == made
    without = await client.post(f"{fleet.urls['f0']}{CHAT}", json=asked)
    assert without.json()["id"] != first.json()["id"] and tokens() > made


@pytest.mark.slow
async def test_at_the_same_time_one_of_two_is_answered(fleet: Fleet, client: httpx.AsyncClient) -> None:
    asked = {**body(10), "stream": False, "stream_options": None}
    key = {"idempotency-key": "key 10"}
    answers = await asyncio.gather(
        *(client.post(f"{fleet.urls[name]}{CHAT}", json=asked, headers=key) for name in FRONT_ENDS * 3)
    )
    assert {answer.status_code for answer in answers} <= {200, 409}
    contents = {answer.content for answer in answers if answer.status_code == 200}
    assert len(contents) == 1


@pytest.mark.slow
async def test_two_choices_keep_their_order(fleet: Fleet, client: httpx.AsyncClient) -> None:
    asked = {**body(12), "n": 2, "temperature": 1, "seed": 3}
    received = await leave_after(client, fleet.urls["f0"], asked, 30, {"idempotency-key": "key 12"})
    resumed = await stream(client, [fleet.urls["f1"]], asked, received)
    whole = await stream(client, [fleet.urls["f1"]], asked, Received(), headers={"idempotency-key": "key 12"})
    assert resumed.events == whole.events


async def test_what_cannot_be_resumed(fleet: Fleet, client: httpx.AsyncClient) -> None:
    url, asked = fleet.urls["f1"], body(11)
    received = await leave_after(client, fleet.urls["f0"], asked, 5, {"idempotency-key": "key 11"})

    async def ask(what: object, **headers: str) -> tuple[int, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return error(await client.post(f"{url}{CHAT}", json=what, headers=named))

    other = {**asked, "seed": 12}
    answer_id, run, _ = received.last_id.rsplit(".", 2)
    assert await ask(other, idempotency_key="key 11") == (422, "UnprocessableEntityError")
    assert await ask(other, last_event_id=received.last_id) == (422, "UnprocessableEntityError")
    assert await ask(asked, last_event_id="5") == (400, "BadRequestError")
    assert await ask(asked, last_event_id=f"{'0' * 32}.1.5") == (404, "NotFoundError")
    assert await ask(asked, last_event_id=f"{answer_id}.9.5") == (409, "ConflictError")
    # More than there was when its client left: of another log than the one that is kept.
    assert await ask(asked, last_event_id=f"{answer_id}.{run}.200") == (409, "ConflictError")
    assert await ask(asked, idempotency_key="k" * 256) == (400, "BadRequestError")
    # A request that vLLM refuses leaves its key free.
    wrong = {**asked, "max_tokens": -1}
    assert (await ask(wrong, idempotency_key="key 11b"))[0] == 400
    right = await client.post(f"{url}{CHAT}", json=asked, headers={"idempotency-key": "key 11b"})
    assert right.status_code == 200
    # After all that the answer is there; without its body, too.
    rest = await client.post(f"{url}{CHAT}", headers={"last-event-id": received.last_id})
    assert rest.status_code == 200 and rest.text.startswith(f"id: {answer_id}.")
    assert rest.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_frozen_second_front_end_does_not_hold_streams_up(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    asked = body(13)
    undisturbed = await stream(client, [fleet.urls["f1"]], asked, Received())

    def freeze(received: Received) -> None:
        if len(received.events) == 10:
            fleet.processes["f1"].freeze()

    try:
        answer = await stream(client, [fleet.urls["f0"]], asked, Received(), freeze)
    finally:
        fleet.processes["f1"].thaw()
    assert answer.same(undisturbed) and answer.connections == 1
    assert fleet.metric("f0", "tailrace_frontend_answer_peers_lost_total") >= 1


@pytest.mark.slow
async def test_one_that_hangs_does_not_go_on_with_what_was_taken_over(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    first, second = fleet.urls["f0"], fleet.urls["f1"]
    undisturbed = await asyncio.gather(
        *(stream(client, [second], body(number), Received()) for number in range(FEW))
    )
    received = [Received() for _ in range(FEW)]

    def freeze_when_all_flow(_: Received) -> None:
        if all(len(each.events) == 10 for each in received[:1]):
            fleet.processes["f0"].freeze()

    # Who hears nothing for two seconds comes back.
    impatient = httpx.Timeout(60, read=2)
    try:
        async with httpx.AsyncClient(timeout=impatient) as leaving:
            resumed = await asyncio.gather(
                *(
                    stream(leaving, [first, second, second], body(number), mine, freeze_when_all_flow)
                    for number, mine in enumerate(received)
                )
            )
    finally:
        fleet.processes["f0"].thaw()
    assert [mine.same(other) for mine, other in zip(resumed, undisturbed, strict=True)] == [True] * FEW
    # What hung had them at its own runs, and lets go.
    wait_until(lambda: fleet.metric("f0", "tailrace_frontend_streams") == 0, "the old runs to end")
    again = await stream(client, [first], body(0), Received(undisturbed[0].events[:1], resumed[0].ids[:1]))
    assert again.same(undisturbed[0])


async def test_killed_under_fifty_streams(fleet: Fleet, client: httpx.AsyncClient) -> None:
    first, second = fleet.urls["f0"], fleet.urls["f1"]
    received = [Received() for _ in range(STREAMS)]
    not_flowing = set(range(STREAMS))
    at_kill: list[int] = []

    async def read_past_kill(number: int) -> None:
        def kill_when_all_flow(mine: Received) -> None:
            if not at_kill and len(mine.events) > 10:
                not_flowing.discard(number)
                if not not_flowing:
                    fleet.processes["f0"].kill()
                    at_kill.extend(len(each.events) for each in received)
            elif at_kill and mine.connections > 1 and len(mine.events) >= at_kill[number] + 30:
                raise Enough

        # Too long to end before the last stream has begun, however slow the machine is.
        asked = body(number, 6000)
        with suppress(Enough):
            await stream(client, [first, second], asked, received[number], kill_when_all_flow)

    await asyncio.gather(*map(read_past_kill, range(STREAMS)))
    assert not fleet.processes["f0"].alive
    assert [each.connections for each in received] == [2] * STREAMS
    assert all(len(set(each.ids)) == len(each.events) for each in received)
    undisturbed = await asyncio.gather(
        *(
            leave_after(client, second, body(number, 6000), len(mine.events), {})
            for number, mine in enumerate(received)
        )
    )
    equal = [mine.same(other) for mine, other in zip(received, undisturbed, strict=True)]
    assert equal.count(True) == STREAMS
