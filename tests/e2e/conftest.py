"""Fleets shared by tests of several files. Starting one takes long, so they are repaired after each test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.harness.chats import Chats
from tests.harness.fleet import Fleet

RUST_FRONT = Path(sys.executable).parent / "vllm-rs"
VLLM_WORKERS = ("w0", "w1", "w2")
# Logs as JSON, as the front end does.
JSON_WORKER = "w0"
# vLLM schedules asynchronously on GPUs, and not on CPU unless told to: requests move between both kinds.
VLLM_OPTIONS = {
    "w0": ["--no-async-scheduling"],
    "w1": ["--async-scheduling"],
    "w2": ["--async-scheduling"],
}
# Blocks of 32 tokens: far more than the tests need, and an eighth of a worker's default memory.
VLLM_KV_BLOCKS = "2048"
# Enough for the outputs of a usual step, but not for all log-probabilities of a long prompt.
VLLM_MAX_MESSAGE_BYTES = 4 << 20
SIMULATED_WORKERS = ("w0", "w1", "w2")


# The shared fleets that run, by the fixture that returns them.
_RUNNING = pytest.StashKey[dict[str, Fleet]]()


def _shared(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    engine: str,
    start: Callable[[Fleet], None],
) -> Fleet:
    """Return the fleet of this fixture, which is started if it does not run."""
    running = request.session.stash.setdefault(_RUNNING, {})
    name = request.fixturename
    assert name is not None
    if name not in running:
        fleet = running[name] = Fleet(folders.mktemp(engine), engine)
        try:
            start(fleet)
        except BaseException:
            running.pop(name).close()
            raise
    return running[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """End shared fleets that the next file does not use: idle, each takes a tenth of a core."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path != item.path:
            next_path = None if nextitem is None else nextitem.path
            next_file = [test for test in item.session.items if test.path == next_path]
            running = item.session.stash.get(_RUNNING, {})
            for name in list(running):
                if not any(name in getattr(test, "fixturenames", ()) for test in next_file):
                    running.pop(name).close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End shared fleets if the run was interrupted."""
    for fleet in session.stash.get(_RUNNING, {}).values():
        fleet.close()


@pytest.fixture(scope="module")
def vllm_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Three real vLLM workers behind vLLM's Python API server."""
    return _shared(request, tmp_path_factory, "vllm", _start_vllm)


def _start_vllm(fleet: Fleet) -> None:
    fleet.start_control()
    for name in VLLM_WORKERS:
        options = [*VLLM_OPTIONS[name], "--max-logprobs", "-1", "--kv-blocks", VLLM_KV_BLOCKS]
        # On a CPU engine evicted prefixes stay in host memory only if this is given.
        options += ["--host-kv-bytes", str(1 << 30)]
        # Tests hold a pull while other processes of the cluster restart, on a machine of any speed.
        options += ["--pull-timeout", "120"]
        options += ["--log-format", "json" if name == JSON_WORKER else "text"]
        fleet.start_worker(name, options, wait=False)
    own = ["--max-message-bytes", str(VLLM_MAX_MESSAGE_BYTES), "--log-format", "json"]
    fleet.start_frontend(options=[*own, "--max-logprobs", "-1", "--enable-prompt-tokens-details"])
    for name in VLLM_WORKERS:
        fleet.wait_healthy(name)
    fleet.wait_instances(VLLM_WORKERS)


@pytest.fixture
def vllm_fleet(vllm_session: Fleet) -> Iterator[Fleet]:
    """The shared fleet, complete and idle before and after each test."""
    yield from _repaired(vllm_session, VLLM_WORKERS)


@pytest.fixture(scope="module")
def simulated_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Three simulated workers, behind vLLM's Rust API server (it starts at once) if it is installed."""
    return _shared(request, tmp_path_factory, "simulated", _start_simulated)


def _start_simulated(fleet: Fleet) -> None:
    fleet.start_control(schedulers=2)
    for name in SIMULATED_WORKERS:
        fleet.start_worker(name, wait=False)
    fleet.start_frontend("rust" if RUST_FRONT.exists() else "python")
    fleet.wait_instances(SIMULATED_WORKERS)


@pytest.fixture
def simulated_fleet(simulated_session: Fleet) -> Iterator[Fleet]:
    """The shared fleet, complete and idle before and after each test."""
    yield from _repaired(simulated_session, SIMULATED_WORKERS)


def _repaired(fleet: Fleet, workers: tuple[str, ...]) -> Iterator[Fleet]:
    fleet.disarm()
    fleet.repair()
    fleet.wait_leader()
    fleet.wait_instances(workers)
    yield fleet
    fleet.disarm()
    fleet.repair()
    fleet.wait_idle()


@pytest.fixture
def vllm_chats(vllm_fleet: Fleet) -> Iterator[Chats]:
    """Clients of the vLLM fleet."""
    chats = Chats(vllm_fleet.http)
    yield chats
    chats.close()


@pytest.fixture
def simulated_chats(simulated_fleet: Fleet) -> Iterator[Chats]:
    """Clients of the simulated fleet."""
    chats = Chats(simulated_fleet.http)
    yield chats
    chats.close()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder for a test's own logs."""
    return tmp_path
