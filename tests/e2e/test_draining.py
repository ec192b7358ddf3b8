"""Workers that are told to stop while they carry streams: their streams are moved, and no token is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from examples.fleet import Chat
from tests.e2e.chats import Chats
from tests.e2e.fleet import Fleet
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]

PROMPTS = [f"Prompt {number} of a worker that is told to stop." for number in range(12)]
OPTIONS: dict[str, object] = {"max_tokens": 500, "extra_body": {"min_tokens": 500}}


@pytest.fixture(scope="module")
def undisturbed(simulated_session: Fleet) -> list[Chat]:
    """What the prompts give when nothing happens."""
    chats = Chats(simulated_session.http)
    try:
        return chats.run_all(PROMPTS, **OPTIONS)
    finally:
        chats.close()


def begin(chats: Chats) -> list[Future[Chat]]:
    """The prompts again, each once its first tokens have come."""

    def flows(event: threading.Event, chat: Chat) -> None:
        event.set()

    flowing = [threading.Event() for _ in PROMPTS]
    streams = [
        chats.start(prompt, partial(flows, event), **OPTIONS)
        for prompt, event in zip(PROMPTS, flowing, strict=True)
    ]
    for event in flowing:
        assert event.wait(30)
    return streams


def stop(fleet: Fleet, names: Sequence[str]) -> None:
    """SIGTERM to all at once; each must end by itself."""
    with ThreadPoolExecutor(len(names)) as pool:
        codes = list(pool.map(lambda name: fleet.processes[name].stop(60), names))
    assert codes == [0] * len(names)


def finished(streams: Sequence[Future[Chat]], undisturbed: Sequence[Chat]) -> None:
    """Every answer is the one that it would have been."""
    for stream, alone in zip(streams, undisturbed, strict=True):
        assert stream.result(timeout=60).same_text_and_usage(alone)


def recoveries(fleet: Fleet, cause: str) -> float:
    """Streams that went on elsewhere by being computed anew, and why."""
    return fleet.metric("frontend", "tailrace_frontend_recoveries_total", f'cause="{cause}"')


@pytest.mark.parametrize("names", [("w0",), ("w0", "w1")], ids=["one", "two at once"])
def test_a_worker_that_is_told_to_stop_moves_its_streams(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat], names: tuple[str, ...]
) -> None:
    lost = recoveries(simulated_fleet, "lost")
    before = simulated_fleet.metric("frontend", "tailrace_frontend_adoptions_total")
    streams = begin(simulated_chats)
    stop(simulated_fleet, names)
    finished(streams, undisturbed)
    assert simulated_fleet.metric("frontend", "tailrace_frontend_adoptions_total") > before
    assert recoveries(simulated_fleet, "lost") == lost


def test_without_a_scheduler_what_is_left_is_computed_anew(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat]
) -> None:
    lost, handed_back = recoveries(simulated_fleet, "lost"), recoveries(simulated_fleet, "handed_back")
    simulated_fleet.start_worker("w3", ["--drain-timeout", "0.5"])
    simulated_fleet.wait_instances(("w0", "w1", "w2", "w3"))
    streams = begin(simulated_chats)
    wait_until(lambda: simulated_fleet.metric("w3", "tailrace_worker_requests") > 0, "w3 to carry a stream")
    schedulers = [name for name in simulated_fleet.processes if name.startswith("scheduler")]
    for name in schedulers:
        simulated_fleet.processes[name].kill()
    stop(simulated_fleet, ["w3"])
    del simulated_fleet.processes["w3"]
    finished(streams, undisturbed)
    assert recoveries(simulated_fleet, "handed_back") > handed_back
    assert recoveries(simulated_fleet, "lost") == lost
