"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from execnet import XSpec
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tailrace.store.store import Store
from tests.harness.forked import end_servers, servers, start_servers, use_servers
from tests.harness.local_etcd import LocalEtcd
from tests.leftovers import end_with_this_process
from tests.machine import free_cores
from tests.ports import free_port
from tests.waiting import WAIT_S

# torch reads this on import, here and in processes that tests start. On a busy machine its threads wait for
# each other: with two of them, training the small predictors takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# numba reads this. Once vLLM has looked for n-gram drafts with it, OpenMP otherwise uses all cores, also for
# torch: a step of a tiny model then takes five times as long.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# torch reads this, too. vLLM compiles functions for sampling when a request first needs them: with a cold
# cache, C++ compilers for four engines at once take minutes of two cores, and a step waits for them. Without,
# the functions do the same.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# No deadline, and no limit of the time to draw examples: both depend on the machine.
_SLOW = (HealthCheck.too_slow,)
settings.register_profile("tailrace", deadline=None, suppress_health_check=_SLOW)
# For `make mutants`: no shrinking, since only failure matters, and examples depend only on the seed.
settings.register_profile(
    "mutants",
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=_SLOW,
)
settings.load_profile("tailrace")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return HOST:PORT of one etcd for the whole run. A test that kills etcd uses local_etcd instead."""
    server = LocalEtcd(tmp_path_factory.mktemp("etcd") / "data", free_port())
    server.launch()
    try:
        deadline_s = time.monotonic() + WAIT_S
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


@pytest.fixture(autouse=True)
def module_path() -> Iterator[None]:
    """Undo what a command that ran in this process has set for those that it starts."""
    before = os.environ.get("PYTHONSAFEPATH")
    yield
    if before is None:
        os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt this process and its children, even if the run was started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Imports create a million permanent objects; exclude them from garbage collection.
gc.disable()


# What `make test` needs at the least: with less, services miss their own deadlines (leases, health checks).
_CORES_NEEDED = 0.8
_ANYWAY = "TAILRACE_TEST_ANYWAY"


def pytest_configure(config: pytest.Config) -> None:
    """End what the run starts when the run ends. Refuse a whole run on a machine that is too slow for it."""
    if hasattr(config, "workerinput"):
        use_servers(config.workerinput["servers"])
        return
    end_with_this_process()
    if "MAKELEVEL" not in os.environ or os.environ.get(_ANYWAY):
        return
    if (cores := free_cores(_CORES_NEEDED)) < _CORES_NEEDED:
        pytest.exit(
            f"this machine is too slow for the tests: {cores:.1f} of a core is free, and they need two "
            f"({_CORES_NEEDED:g} at the least). Give it more, stop what else runs, or try with {_ANYWAY}=1.",
            returncode=2,
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    """Fork the workers of a whole run from one process: each would import vLLM to collect the tests."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        python = start_servers()
        for spec in specs:
            spec.python = python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Let the workers fork services from the same processes."""
    node.workerinput["servers"] = servers()


def pytest_unconfigure() -> None:
    """End what all fleets of the run share."""
    end_servers()


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
        "simulated engines": ("alert_metrics", "draining", "fuzz", "kill_matrix"),
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
