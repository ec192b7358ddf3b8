"""Workers that are told to stop while they carry streams: their streams are moved, and no token is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from examples.fleet import Chat
from tests.e2e.chats import Chats
from tests.e2e.conftest import RUST_FRONT
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


def begin(chats: Chats, count: int = len(PROMPTS)) -> list[Future[Chat]]:
    """So many of the prompts again, once the first tokens of each have come."""

    def flows(event: threading.Event, chat: Chat) -> None:
        event.set()

    flowing = [threading.Event() for _ in range(count)]
    streams = [
        chats.start(prompt, partial(flows, event), **OPTIONS)
        for prompt, event in zip(PROMPTS[:count], flowing, strict=True)
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


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("import:pre_copy", "source"),
        pytest.param("import:pre_copy", "target", marks=pytest.mark.slow),
        pytest.param("import:paused", "source", marks=pytest.mark.slow),
        ("import:paused", "target"),
        ("import:adopt", "source"),
        pytest.param("import:adopt", "target", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_told_to_stop_in_the_middle_of_a_migration(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat], step: str, told: str
) -> None:
    stream = begin(simulated_chats, 1)[0]
    request = simulated_fleet.wait_request("")
    target = next(name for name in simulated_fleet.instances() if name != request.instance_id)
    simulated_fleet.arm({"hold": step, "seconds": 1})
    moving = threading.Thread(target=move, args=(simulated_fleet, request.request_id, target))
    moving.start()
    simulated_fleet.wait_held(step)
    stop(simulated_fleet, [request.instance_id if told == "source" else target])
    simulated_fleet.disarm()
    finished([stream], undisturbed[:1])
    moving.join(timeout=60)


def test_a_front_end_and_a_worker_that_are_told_to_stop_together(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat]
) -> None:
    streams = begin(simulated_chats)
    stop(simulated_fleet, ["w0", "frontend"])
    finished(streams, undisturbed)


def move(fleet: Fleet, request_id: str, target: str) -> None:
    """Migrate; how it ends is not the point."""
    try:
        fleet.migrate(request_id, target)
    except grpc.RpcError as refused:
        print(f"not migrated: {refused}")


@pytest.mark.slow
def test_where_the_others_have_no_room_the_rest_waits_its_turn_there(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "simulated")
    try:
        fleet.start_control()
        for name in ("w0", "w1"):
            # Of streams of some 530 tokens, two at a time.
            fleet.start_worker(name, ["--kv-blocks", "72", "--drain-timeout", "1"], wait=False)
        fleet.start_frontend("rust" if RUST_FRONT.exists() else "python")
        fleet.wait_instances(("w0", "w1"))
        chats = Chats(fleet.http)
        alone = chats.run_all(PROMPTS, **OPTIONS)
        streams = [chats.start(prompt, **OPTIONS) for prompt in PROMPTS]
        wait_until(lambda: fleet.metric("w0", "tailrace_worker_requests") >= 4, "w0 to have its share")
        stop(fleet, ["w0"])
        finished(streams, alone)
        assert recoveries(fleet, "handed_back") > 0
        assert recoveries(fleet, "lost") == 0
    finally:
        fleet.close()
