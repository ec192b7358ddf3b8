"""Fleets shared by tests. Starting one takes most of a minute, so they are repaired after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def vllm_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three real vLLM workers behind vLLM's Python API server."""
    fleet = Fleet(tmp_path_factory.mktemp("vllm"), "vllm")
    try:
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
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def vllm_fleet(vllm_session: Fleet) -> Iterator[Fleet]:
    """The shared fleet, complete and idle before and after each test."""
    yield from _repaired(vllm_session, VLLM_WORKERS)


@pytest.fixture(scope="session")
def simulated_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three simulated workers, behind vLLM's Rust API server (it starts at once) if it is installed."""
    fleet = Fleet(tmp_path_factory.mktemp("simulated"), "simulated")
    try:
        fleet.start_control(schedulers=2)
        for name in SIMULATED_WORKERS:
            fleet.start_worker(name, wait=False)
        fleet.start_frontend("rust" if RUST_FRONT.exists() else "python")
        fleet.wait_instances(SIMULATED_WORKERS)
        yield fleet
    finally:
        fleet.close()


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
