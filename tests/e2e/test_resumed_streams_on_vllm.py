"""Slow: a front end is killed under fifty streams of real engines, and all clients get the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from examples.fifty_streams import variants
from tests.e2e.conftest import VLLM_KV_BLOCKS
from tests.e2e.resuming import Received, stream
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

STREAMS = 50
FRONT_ENDS = ("f0", "f1")
WORKERS = ("w0", "w1")


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two real engines behind two front ends that keep answers."""
    fleet = Fleet(tmp_path_factory.mktemp("answers-vllm"), "vllm")
    try:
        fleet.start_control()
        for name in WORKERS:
            fleet.start_worker(name, ["--kv-blocks", VLLM_KV_BLOCKS], wait=False)
        options = [
            "--keep-answers",
            f"{2 * WAIT_S:g}",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ]
        for name in FRONT_ENDS:
            fleet.start_frontend(name=name, options=options, wait=False)
        for name in FRONT_ENDS:
            fleet.wait_frontend(name)
        for name in WORKERS:
            fleet.wait_healthy(name)
        fleet.wait_instances(WORKERS)
        peers = "tailrace_frontend_answer_peers"
        wait_until(
            lambda: all(fleet.metric(name, peers) == 1 for name in FRONT_ENDS),
            "the front ends to know each other",
        )
        yield fleet
    finally:
        fleet.close()


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["one", "two", "three"]}},
            "required": ["a"],
        },
    },
}


def make_bodies() -> list[dict[str, object]]:
    """Return request bodies: greedy, seeded, with penalties, log-probabilities, two choices or tool calls."""
    request_bodies = []
    for number, (prompt, options) in enumerate(variants(STREAMS)):
        request_body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **options}
        request_body |= {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 150}
        if number % 10 == 6:
            request_body |= {"n": 2, "seed": number}
        elif number % 10 == 5:
            request_body |= {"tools": [TOOL], "tool_choice": "required", "min_tokens": 0}
        request_bodies.append(request_body)
    return request_bodies


async def test_killed_under_fifty_streams(fleet: Fleet) -> None:
    first, second = fleet.urls["f0"], fleet.urls["f1"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
        undisturbed = await asyncio.gather(
            *(
                stream(client, [second], request_body, Received(), patience_s=2 * WAIT_S)
                for request_body in make_bodies()
            )
        )
        received = [Received() for _ in range(STREAMS)]

        def kill_in_the_middle(_: Received) -> None:
            if sum(len(each.events) for each in received) > 40 * STREAMS:
                fleet.processes["f0"].kill()

        resumed = await asyncio.gather(
            *(
                stream(client, [first, second], request_body, mine, kill_in_the_middle, patience_s=2 * WAIT_S)
                for request_body, mine in zip(make_bodies(), received, strict=True)
            )
        )
    assert not fleet.processes["f0"].alive
    assert sum(each.connections > 1 for each in resumed) > STREAMS // 2
    unequal = [
        (number, mine.summary, other.summary)
        for number, (mine, other) in enumerate(zip(resumed, undisturbed, strict=True))
        if mine.summary != other.summary
    ]
    assert unequal == []
