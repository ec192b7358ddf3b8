"""Fixtures for all tests."""

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

# torch reads this on import, here and in processes that tests start. On a busy machine its threads wait for
# each other: with two of them, training the small predictors takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: the time of an example depends on the machine.
settings.register_profile("tailrace", deadline=None)
# For `make mutants`: no shrinking, since only failure matters, and examples depend only on the seed.
settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("tailrace")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return HOST:PORT of one etcd for the whole run. A test that kills etcd uses local_etcd instead."""
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
    """Return a cluster name unique to this test."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def store(etcd: str, cluster: str) -> AsyncIterator[Store]:
    """Yield a store of this test's cluster."""
    connected = await Store.connect([etcd], cluster)
    yield connected
    await connected.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt this process and its children, even if the run was started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Imports create a million permanent objects; exclude them from garbage collection.
gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection once everything is imported."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that start vLLM first, then fleets: they take longest, and the others fill the gaps."""

    def priority(item: pytest.Item) -> int:
        if item.get_closest_marker("vllm") is not None:
            return 0
        return 1 if item.get_closest_marker("fleet") is not None else 2

    items.sort(key=priority)


# Files by the fleet that they share, since starting it takes long.
_SHARED_FLEETS = {
    f"tests/e2e/test_{name}.py": fleet
    for fleet, names in {
        "vLLM engines": ("policies_on_vllm", "prefix_cache", "vllm_api", "vllm_fleet"),
        "simulated engines": ("draining", "fuzz", "kill_matrix"),
    }.items()
    for name in names
}


class FleetScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Run the tests of a file in one process, and those of all files that share a fleet, too.

    Two fleets of vLLM engines at once start too slowly on two cores and exceed a small machine's memory.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SHARED_FLEETS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return the scheduler for `--dist loadfile`, else None for xdist's own."""
    return FleetScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
