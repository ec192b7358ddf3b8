"""Streams survive the loss of their front end: all clients get the rest of theirs from the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import httpx
import pytest

from tests.e2e.resuming import Received, read_events, stream
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

FEW = 5
CHAT = "/v1/chat/completions"
# For as long as a busy machine may take to come back for them.
KEEP = ["--keep-answers", f"{2 * WAIT_S:g}"]
# A step takes about 35 ms, so that fifty streams need a small part of a core.
SLOW = ["--sim", "speed=0.2"]
# Seconds in which a stream must end on a machine that runs other tests.
# For fifty streams at once: longer than WAIT_S, and within pytest's limit.
PATIENCE_S = 4 * WAIT_S


class Enough(Exception):
    """Raised by a client that has read enough."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two simulated workers behind two front ends that keep answers."""
    fleet = Fleet(tmp_path_factory.mktemp("answers"), "simulated")
    try:
        fleet.start_control()
        for name in ("w0", "w1"):
            fleet.start_worker(name, SLOW, wait=False)
        for name in FRONT_ENDS:
            fleet.start_frontend(name=name, options=KEEP, wait=False)
        for name in FRONT_ENDS:
            fleet.wait_frontend(name)
        fleet.wait_instances(("w0", "w1"))
        yield fleet
    finally:
        for name in FRONT_ENDS:
            # Otherwise the workers would drain streams that nobody reads any more.
            fleet.processes[name].kill()
        fleet.close()


FRONT_ENDS = ("f0", "f1")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client, once both front ends run and know each other."""
    fleet.repair()
    for name in FRONT_ENDS:
        fleet.wait_frontend(name)
    wait_until(
        lambda: all(fleet.metric(name, "tailrace_frontend_answer_peers") == 1 for name in FRONT_ENDS),
        "the front ends to know each other",
    )
    async with httpx.AsyncClient(timeout=WAIT_S, limits=httpx.Limits(max_connections=None)) as client:
        yield client


def body(number: int, tokens: int = 40) -> dict[str, object]:
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


async def read_and_disconnect(
    client: httpx.AsyncClient, url: str, request_body: dict[str, object], events: int, headers: dict[str, str]
) -> Received:
    """Read this many events and disconnect."""
    received = Received()
    async with client.stream("POST", f"{url}{CHAT}", json=request_body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for event_id, data in read_events(answer):
            received.ids.append(event_id)
            received.events.append(data)
            if len(received.events) == events:
                break
    return received


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the type of the error object, which must be complete."""
    body = answer.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"} and body["message"]
    assert body["code"] == answer.status_code
    return answer.status_code, body["type"]


@pytest.mark.parametrize("second", FRONT_ENDS)
async def test_stream_resumes_where_its_client_reconnects(
    fleet: Fleet, client: httpx.AsyncClient, second: str
) -> None:
    first, request_body = fleet.urls["f0"], body(7)
    undisturbed = await stream(client, [first], request_body, Received())
    received = await read_and_disconnect(client, first, request_body, 20, {})
    # Without a reader its KV is freed; it is recomputed when a client reconnects.
    fleet.wait_idle()
    resumed = await stream(client, [fleet.urls[second]], request_body, received)
    assert resumed.is_equal_to(undisturbed)
    # Resume once more from the start of the log, although all of it has been delivered.
    again = Received(undisturbed.events[:1], resumed.ids[:1])
    assert (await stream(client, [first], request_body, again)).is_equal_to(undisturbed)


@pytest.mark.slow
async def test_key_gets_the_whole_answer_at_any_front_end(fleet: Fleet, client: httpx.AsyncClient) -> None:
    request_body, key = body(8), {"idempotency-key": "key 8"}
    undisturbed = await stream(client, [fleet.urls["f1"]], request_body, Received())
    await read_and_disconnect(client, fleet.urls["f0"], request_body, 20, key)
    for name in ("f1", "f0", "f0"):
        answer = await stream(client, [fleet.urls[name]], request_body, Received(), headers=key)
        assert answer.is_equal_to(undisturbed)


async def test_unstreamed_request_is_answered_once(fleet: Fleet, client: httpx.AsyncClient) -> None:
    request_body = {
        **body(9),
        "stream": False,
        "stream_options": None,
        "n": 2,
        "seed": None,
        "temperature": 1,
    }
    key = {"idempotency-key": "key 9"}

    def tokens() -> float:
        return sum(fleet.metric(name, "tailrace_frontend_tokens_total") for name in FRONT_ENDS)

    first = await client.post(f"{fleet.urls['f0']}{CHAT}", json=request_body, headers=key)
    assert first.status_code == 200 and len(first.json()["choices"]) == 2
    tokens_before = tokens()
    for name in ("f1", "f0"):
        again = await client.post(f"{fleet.urls[name]}{CHAT}", json=request_body, headers=key)
        assert (again.status_code, again.content) == (200, first.content)
    assert tokens() == tokens_before
    without = await client.post(f"{fleet.urls['f0']}{CHAT}", json=request_body)
    assert without.json()["id"] != first.json()["id"] and tokens() > tokens_before


@pytest.mark.slow
async def test_concurrent_requests_with_one_key_get_one_answer(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    request_body = {**body(10), "stream": False, "stream_options": None}
    key = {"idempotency-key": "key 10"}
    answers = await asyncio.gather(
        *(client.post(f"{fleet.urls[name]}{CHAT}", json=request_body, headers=key) for name in FRONT_ENDS * 3)
    )
    assert {answer.status_code for answer in answers} <= {200, 409}
    contents = {answer.content for answer in answers if answer.status_code == 200}
    assert len(contents) == 1


@pytest.mark.slow
async def test_two_choices_keep_their_order(fleet: Fleet, client: httpx.AsyncClient) -> None:
    request_body = {**body(12), "n": 2, "temperature": 1, "seed": 3}
    received = await read_and_disconnect(
        client, fleet.urls["f0"], request_body, 30, {"idempotency-key": "key 12"}
    )
    resumed = await stream(client, [fleet.urls["f1"]], request_body, received)
    whole = await stream(
        client, [fleet.urls["f1"]], request_body, Received(), headers={"idempotency-key": "key 12"}
    )
    assert resumed.events == whole.events


async def test_invalid_resumes_are_refused(fleet: Fleet, client: httpx.AsyncClient) -> None:
    url, request_body = fleet.urls["f1"], body(11)
    received = await read_and_disconnect(
        client, fleet.urls["f0"], request_body, 5, {"idempotency-key": "key 11"}
    )

    async def ask(content: object, **headers: str) -> tuple[int, str]:
        http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return error_of(await client.post(f"{url}{CHAT}", json=content, headers=http_headers))

    other = {**request_body, "seed": 12}
    answer_id, run, _ = received.last_id.rsplit(".", 2)
    assert await ask(other, idempotency_key="key 11") == (422, "UnprocessableEntityError")
    assert await ask(other, last_event_id=received.last_id) == (422, "UnprocessableEntityError")
    assert await ask(request_body, last_event_id="5") == (400, "BadRequestError")
    assert await ask(request_body, last_event_id=f"{'0' * 32}.1.5") == (404, "NotFoundError")
    assert await ask(request_body, last_event_id=f"{answer_id}.9.5") == (409, "ConflictError")
    # More events than there were when its client disconnected: the ID belongs to another log.
    assert await ask(request_body, last_event_id=f"{answer_id}.{run}.200") == (409, "ConflictError")
    assert await ask(request_body, idempotency_key="k" * 256) == (400, "BadRequestError")
    # A request that vLLM refuses leaves its key free.
    wrong = {**request_body, "max_tokens": -1}
    assert (await ask(wrong, idempotency_key="key 11b"))[0] == 400
    right = await client.post(f"{url}{CHAT}", json=request_body, headers={"idempotency-key": "key 11b"})
    assert right.status_code == 200
    # After all that the answer is still available, also without the request's body.
    rest = await client.post(f"{url}{CHAT}", headers={"last-event-id": received.last_id})
    assert rest.status_code == 200 and rest.text.startswith(f"id: {answer_id}.")
    assert rest.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_frozen_peer_does_not_delay_streams(fleet: Fleet, client: httpx.AsyncClient) -> None:
    request_body = body(13)
    undisturbed = await stream(client, [fleet.urls["f1"]], request_body, Received())

    def freeze(received: Received) -> None:
        if len(received.events) == 10:
            fleet.processes["f1"].freeze()

    try:
        answer = await stream(client, [fleet.urls["f0"]], request_body, Received(), freeze)
        # Before it could answer again.
        lost = "tailrace_frontend_answer_peers_lost_total"
        await asyncio.to_thread(wait_until, lambda: fleet.metric("f0", lost) >= 1, "the peer to be lost")
    finally:
        fleet.processes["f1"].thaw()
    assert answer.is_equal_to(undisturbed) and answer.connections == 1


@pytest.mark.slow
async def test_hung_front_end_gives_up_answers_that_were_taken_over(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    first, second = fleet.urls["f0"], fleet.urls["f1"]
    undisturbed = await asyncio.gather(
        *(stream(client, [second], body(number), Received()) for number in range(FEW))
    )
    received = [Received() for _ in range(FEW)]

    def freeze_when_first_flows(_: Received) -> None:
        if all(len(each.events) == 10 for each in received[:1]):
            fleet.processes["f0"].freeze()

    # A client that receives nothing for two seconds reconnects.
    impatient = httpx.Timeout(WAIT_S, read=2)
    try:
        async with httpx.AsyncClient(timeout=impatient) as client_with_timeout:
            resumed = await asyncio.gather(
                *(
                    stream(
                        client_with_timeout,
                        [first, second, second],
                        body(number),
                        mine,
                        freeze_when_first_flows,
                    )
                    for number, mine in enumerate(received)
                )
            )
    finally:
        fleet.processes["f0"].thaw()
    assert [mine.is_equal_to(other) for mine, other in zip(resumed, undisturbed, strict=True)] == [True] * FEW
    # The hung front end still had its own runs of them, which it now ends.
    wait_until(lambda: fleet.metric("f0", "tailrace_frontend_streams") == 0, "the old runs to end")
    again = await stream(client, [first], body(0), Received(undisturbed[0].events[:1], resumed[0].ids[:1]))
    assert again.is_equal_to(undisturbed[0])


@pytest.mark.parametrize("streams", [12, pytest.param(50, marks=pytest.mark.slow)])
async def test_killed_under_streams(fleet: Fleet, client: httpx.AsyncClient, streams: int) -> None:
    first, second = fleet.urls["f0"], fleet.urls["f1"]
    received = [Received() for _ in range(streams)]
    not_flowing = set(range(streams))
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

        # Too long to end before the last stream has begun, on a machine of any speed.
        request_body = body(number, 6000)
        with suppress(Enough):
            await stream(
                client,
                [first, second],
                request_body,
                received[number],
                kill_when_all_flow,
                patience_s=PATIENCE_S,
            )

    await asyncio.gather(*map(read_past_kill, range(streams)))
    assert not fleet.processes["f0"].alive
    assert [each.connections for each in received] == [2] * streams
    assert all(len(set(each.ids)) == len(each.events) for each in received)
    undisturbed = await asyncio.gather(
        *(
            read_and_disconnect(client, second, body(number, 6000), len(mine.events), {})
            for number, mine in enumerate(received)
        )
    )
    equal = [mine.is_equal_to(other) for mine, other in zip(received, undisturbed, strict=True)]
    assert equal.count(True) == streams
