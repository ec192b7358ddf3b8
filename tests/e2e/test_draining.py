"""Workers stopped while they carry streams: the streams are moved, and no token is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from examples.fleet import Chat
from tests.e2e.conftest import RUST_FRONT, SIMULATED_WORKERS
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES, RequestEnded, before_it_ends
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

PROMPTS = [f"Prompt {number} of a worker that is being stopped." for number in range(8)]
OPTIONS: dict[str, object] = {"max_tokens": 500, "extra_body": {"min_tokens": 500}}
# What such a worker carries would take more than a minute there: it does not end before the worker is
# stopped.
SLOW = ["--sim", "speed=0.05"]


@pytest.fixture(scope="module")
def undisturbed(simulated_session: Fleet) -> list[Chat]:
    """The answers to the prompts without disturbance."""
    chats = Chats(simulated_session.http)
    try:
        return chats.run_all(PROMPTS, **OPTIONS)
    finally:
        chats.close()


def start_streams(chats: Chats, count: int = len(PROMPTS)) -> list[Future[Chat]]:
    """Start streams of the first prompts and wait until each has received its first tokens."""

    def on_first_token(event: threading.Event, chat: Chat) -> None:
        event.set()

    begun = [threading.Event() for _ in range(count)]
    streams = [
        chats.start(prompt, partial(on_first_token, event), **OPTIONS)
        for prompt, event in zip(PROMPTS[:count], begun, strict=True)
    ]
    for event in begun:
        assert event.wait(WAIT_S)
    return streams


def stop(fleet: Fleet, names: Sequence[str]) -> None:
    """Send SIGTERM to all concurrently and check that each exits by itself."""
    with ThreadPoolExecutor(len(names)) as pool:
        codes = list(pool.map(lambda name: fleet.processes[name].stop(), names))
    assert codes == [0] * len(names)


def check_answers(streams: Sequence[Future[Chat]], undisturbed: Sequence[Chat]) -> None:
    """Check that every answer equals the undisturbed one."""
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert stream.result(timeout=WAIT_S).same_text_and_usage(expected)


def recoveries(fleet: Fleet, cause: str) -> float:
    """Return the number of streams recomputed elsewhere for this cause."""
    return fleet.metric("frontend", "tailrace_frontend_recoveries_total", f'cause="{cause}"')


@contextmanager
def slow_workers(fleet: Fleet, names: Sequence[str], *options: str) -> Iterator[None]:
    """Add slow workers to the shared fleet for the block."""
    try:
        for name in names:
            fleet.start_worker(name, [*SLOW, *options])
        fleet.wait_instances((*SIMULATED_WORKERS, *names))
        yield
    finally:
        for name in fleet.processes.keys() & set(names):
            fleet.processes[name].kill()
            fleet.forget(name)


def start_streams_on(fleet: Fleet, chats: Chats, names: Sequence[str]) -> list[Future[Chat]]:
    """Start streams of which each of these slow workers carries some."""

    def attempt() -> list[Future[Chat]]:
        streams = start_streams(chats)
        ended = False

        def carried() -> bool:
            nonlocal ended
            ended = all(stream.done() for stream in streams)
            return ended or all(fleet.metric(name, "tailrace_worker_requests") > 0 for name in names)

        wait_until(carried, "the slow workers to carry streams")
        if ended:
            raise RequestEnded("the slow workers were given no stream")
        return streams

    return before_it_ends(attempt)


@pytest.mark.parametrize("names", [("w3",), ("w3", "w4")], ids=["one", "two at once"])
def test_stopping_worker_moves_its_streams(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat], names: tuple[str, ...]
) -> None:
    # On a machine that is too busy a worker may be silent for so long that its streams are recomputed.
    for _ in range(TRIES):
        silent, lost = simulated_fleet.silences(), recoveries(simulated_fleet, "lost")
        before = simulated_fleet.metric("frontend", "tailrace_frontend_adoptions_total")
        with slow_workers(simulated_fleet, names):
            streams = start_streams_on(simulated_fleet, simulated_chats, names)
            stop(simulated_fleet, names)
            check_answers(streams, undisturbed)
        if simulated_fleet.silences() == silent:
            break
    assert simulated_fleet.metric("frontend", "tailrace_frontend_adoptions_total") > before
    assert recoveries(simulated_fleet, "lost") == lost


def test_remaining_streams_are_recomputed_without_a_scheduler(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat]
) -> None:
    schedulers = [name for name in simulated_fleet.processes if name.startswith("scheduler")]
    for _ in range(TRIES):
        silent, lost = simulated_fleet.silences(), recoveries(simulated_fleet, "lost")
        returned = recoveries(simulated_fleet, "handed_back")
        with slow_workers(simulated_fleet, ["w3"], "--drain-timeout", "0.5"):
            streams = start_streams_on(simulated_fleet, simulated_chats, ["w3"])
            for name in schedulers:
                simulated_fleet.processes[name].kill()
            stop(simulated_fleet, ["w3"])
            check_answers(streams, undisturbed)
        if simulated_fleet.silences() == silent:
            break
        simulated_fleet.repair()
        simulated_fleet.wait_leader()
    assert recoveries(simulated_fleet, "handed_back") > returned
    assert recoveries(simulated_fleet, "lost") == lost


@pytest.mark.parametrize(
    ("step", "stopped"),
    [
        ("import:pre_copy", "source"),
        pytest.param("import:pre_copy", "target", marks=pytest.mark.slow),
        pytest.param("import:paused", "source", marks=pytest.mark.slow),
        ("import:paused", "target"),
        ("import:adopt", "source"),
        pytest.param("import:adopt", "target", marks=pytest.mark.slow),
    ],
)
def test_worker_is_stopped_during_a_migration(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat], step: str, stopped: str
) -> None:
    def held() -> tuple[Future[Chat], str, str, threading.Thread]:
        """Start a stream and hold its migration; return it, source, target, and who waits for the end."""
        (stream,) = start_streams(simulated_chats, 1)
        request = simulated_fleet.wait_request("", ended=stream.done)
        target = next(name for name in simulated_fleet.instances() if name != request.instance_id)
        mover = simulated_fleet.hold_migration(
            request.request_id, target, step, hold_s=1.0, ended=stream.done
        )
        return stream, request.instance_id, target, mover

    stream, source, target, mover = before_it_ends(held)
    stop(simulated_fleet, [source if stopped == "source" else target])
    simulated_fleet.disarm()
    check_answers([stream], undisturbed[:1])
    mover.join(timeout=WAIT_S)


def test_front_end_and_worker_are_stopped_together(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: list[Chat]
) -> None:
    streams = start_streams(simulated_chats)
    stop(simulated_fleet, ["w0", "frontend"])
    check_answers(streams, undisturbed)


@pytest.mark.slow
def test_streams_wait_elsewhere_if_other_workers_have_no_room(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "simulated")
    try:
        fleet.start_control()
        for name in ("w0", "w1"):
            # Room for two streams of some 1,030 tokens.
            fleet.start_worker(name, ["--kv-blocks", "144", "--drain-timeout", "1"], wait=False)
        fleet.start_frontend("rust" if RUST_FRONT.exists() else "python")
        fleet.wait_instances(("w0", "w1"))
        chats = Chats(fleet.http)
        options: dict[str, object] = {"max_tokens": 1_000, "extra_body": {"min_tokens": 1_000}}
        expected = chats.run_all(PROMPTS, **options)
        fleet.wait_idle()
        for _ in range(TRIES):
            silent, lost = fleet.silences(), recoveries(fleet, "lost")
            streams = before_it_ends(lambda: start_streams_with_much_room(fleet, chats, options))
            stop(fleet, ["w0"])
            check_answers(streams, expected)
            # Those of w0, or of w1, may have ended while this process did not run, or w0 was silent.
            if recoveries(fleet, "handed_back") > 0 and fleet.silences() == silent:
                break
            fleet.repair()
            fleet.wait_instances(("w0", "w1"))
        assert recoveries(fleet, "handed_back") > 0
        assert recoveries(fleet, "lost") == lost
    finally:
        fleet.close()


def start_streams_with_much_room(
    fleet: Fleet, chats: Chats, options: dict[str, object]
) -> list[Future[Chat]]:
    """Start streams, and wait until they take much room on both workers."""
    streams = [chats.start(prompt, **options) for prompt in PROMPTS]

    def large() -> bool:
        # Of two streams of w0 half as long as that, at most one finds room on w1, beside two others.
        if all(fleet.metric(name, "tailrace_worker_kv_blocks_used") >= 80 for name in ("w0", "w1")):
            return True
        if all(stream.done() for stream in streams):
            raise RequestEnded("they were not seen to take much room")
        return False

    wait_until(large, "streams that take much room")
    return streams
