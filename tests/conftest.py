"""Fixtures that every area shares."""

from __future__ import annotations

import gc
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tailrace.service.etcd import LocalEtcd
from tailrace.store.store import Store
from tests.ports import free_port

# Read when torch is imported, here and in the processes that tests start. On a busy machine its threads wait
# for each other: training the small predictors takes ten times as long with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's affair: a test asserts no time.
settings.register_profile("tailrace", deadline=None)
# For `make mutants`, which asks whether a test fails, not for the smallest example, and by the seed alone.
settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("tailrace")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of one etcd for the whole run; a test that kills etcd starts its own with local_etcd."""
    server = LocalEtcd(tmp_path_factory.mktemp("etcd") / "data", free_port())
    server.launch()
    try:
        deadline_s = time.monotonic() + 20
        while not server.answers():
            assert time.monotonic() < deadline_s, "etcd did not start"
            time.sleep(0.02)
        yield server.endpoint
    finally:
        server.stop()


@pytest.fixture
def cluster() -> str:
    """A cluster name of this test's own."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def store(etcd: str, cluster: str) -> AsyncIterator[Store]:
    """A store of this test's own cluster."""
    connected = await Store.connect([etcd], cluster)
    yield connected
    await connected.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, here and in children, also where the whole run was started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Imports make a million objects that stay; no collection need look at them, now or during the tests.
gc.disable()


def pytest_collection_finish() -> None:
    """All is imported."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start vLLM, then fleets: they take longest, and the others fill the gaps that they leave."""

    def turn(item: pytest.Item) -> int:
        if item.get_closest_marker("vllm") is not None:
            return 0
        return 1 if item.get_closest_marker("fleet") is not None else 2

    items.sort(key=turn)


# Files by the fleet that they share, which takes a session of pytest long to start.
_SHARED_FLEETS = {
    f"tests/e2e/test_{name}.py": fleet
    for fleet, names in {
        "vLLM engines": ("policies_on_vllm", "prefix_cache", "vllm_api", "vllm_fleet"),
        "simulated engines": ("draining", "fuzz", "kill_matrix"),
    }.items()
    for name in names
}


class OneOfEachFleet(LoadFileScheduling):  # type: ignore[misc]
    """Run each file's tests in one process, and in one process too those of all files that share a fleet.

    Two fleets of vLLM engines at once are more than two cores start in time, and more than a small machine's
    memory holds.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SHARED_FLEETS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For `--dist loadfile`; any other is xdist's own."""
    return OneOfEachFleet(config, log) if config.getvalue("dist") == "loadfile" else None
