"""Fixtures that every area shares."""

from __future__ import annotations

import gc
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from tailrace.local.ports import free_ports
from tailrace.service.etcd import LocalEtcd
from tailrace.store.store import Store

# How long an example takes is the machine's affair: a test asserts no time.
settings.register_profile("tailrace", deadline=None)
settings.load_profile("tailrace")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of one etcd for the whole run; a test that kills etcd starts its own with local_etcd."""
    server = LocalEtcd(tmp_path_factory.mktemp("etcd") / "data", free_ports(1)[0])
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


# Before xdist's own, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start vLLM, then fleets: they take longest, and the others fill the gaps that they leave."""

    def turn(item: pytest.Item) -> int:
        if item.get_closest_marker("vllm") is not None:
            return 0
        return 1 if item.get_closest_marker("fleet") is not None else 2

    items.sort(key=turn)
    for item in items:
        # `--dist loadgroup` keeps in one process: a file, and the files that share the fleet of vLLM engines.
        # Two of those at once would start eight processes that import vLLM, on two cores.
        shared = "vllm_session" in getattr(item, "fixturenames", ())
        name = "vllm_session" if shared else item.path.relative_to(item.config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group(name))
