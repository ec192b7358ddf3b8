"""A front end hangs while another one of its model serves: new requests avoid it, its streams outlast it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import RUST_FRONT
from tests.edge.test_edge import call, stream, text
from tests.harness.chats import client
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs"),
]

# Of a request to one that does not hang, at the least, and as a multiple of what it takes here.
PROMPT_S, PROMPTLY = 2.0, 20
BODY = b'{"model": "chat", "prompt": "x", "max_tokens": 1}'


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two front ends of a model, on ports of their own, and an edge."""
    fleet = Fleet(tmp_path_factory.mktemp("hanging"), "simulated")
    try:
        fleet.start_control()
        fleet.start_worker("w")
        for name in ("frontend-0", "frontend-1"):
            fleet.start_frontend("rust", name, options=["--served-model-name", "chat"])
        fleet.start_edge()
        yield fleet
    finally:
        fleet.close()


def tell(fleet: Fleet, name: str, number: signal.Signals) -> None:
    """Send a signal to a front end and its API server."""
    process = psutil.Process(fleet.processes[name].pid)
    for each in (*process.children(recursive=True), process):
        each.send_signal(number)


def test_new_requests_avoid_a_front_end_that_hangs(fleet: Fleet) -> None:
    url = fleet.urls["edge"]
    api = client(url)
    expected = text(stream(api, "chat", 200))
    began_s = time.monotonic()
    assert call(url, "/v1/completions", BODY)[0] == 200
    prompt_s = max(PROMPT_S, PROMPTLY * (time.monotonic() - began_s))
    with ThreadPoolExecutor(64) as pool:
        begun = [threading.Event() for _ in range(6)]

        def read(number: int) -> str:
            received = []
            for chunk in stream(api, "chat", 200):
                received.append(chunk)
                begun[number].set()
            return text(received)

        # Some on each of the two.
        running = [pool.submit(read, number) for number in range(6)]
        assert all(each.wait(WAIT_S) for each in begun)
        tell(fleet, "frontend-1", signal.SIGSTOP)
        asked: list[Future[tuple[int, Any]]] = []
        answered = 0

        def avoided() -> bool:
            """Return whether ten requests in a row went to the other one."""
            nonlocal answered
            asked.append(pool.submit(call, url, "/v1/completions", BODY))
            done, _ = wait(asked[-1:], prompt_s)
            answered = answered + 1 if done else 0
            return answered == 10

        try:
            wait_until(avoided, "all requests to be answered")
        finally:
            tell(fleet, "frontend-1", signal.SIGCONT)
        # What it has goes on when it does: nothing cuts it.
        assert [each.result(WAIT_S) for each in running] == [expected] * 6
        assert {each.result(WAIT_S)[0] for each in asked} == {200}
