"""A front end without HTTP: a fake API server, the real engine core, scripted workers over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from frontend_svc import placement
from frontend_svc.admission import AdmissionReader
from frontend_svc.engine import FleetEngine
from frontend_svc.fleet import ServedModel
from frontend_svc.settings import Limits, Settings, WaitLimits
from tailrace.model_identity import ModelIdentity
from tailrace.service.channels import Channels
from tailrace.service.vllm_line import VllmLine
from tests.frontend.fake_api_server import FakeApiServer
from tests.frontend.fleet import MODEL, record
from tests.frontend.scripted_worker import ScriptedWorker, serving
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S

PLACE_WAIT_S = 0.5

place_wait_ends = pytest.mark.parametrize("place_wait_s", [PLACE_WAIT_S])
"""For tests in which a request's wait for an instance or for its turn ends."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll until the condition is true, for states without notification. Raise TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Rig:
    """One front end and its fleet. Fallback placement: fewest streams first, then the lowest name."""

    front: FakeApiServer
    engine: FleetEngine
    members: StaticMembers
    admission: AdmissionReader
    registry: CollectorRegistry
    stack: AsyncExitStack
    crashes: dict[str, Callable[[], None]] = field(default_factory=dict)

    async def worker(self, instance_id: str, max_message_bytes: int = 0) -> ScriptedWorker:
        """Add a member and wait until the front end has attached to it."""
        worker = await self.member(instance_id, MODEL, max_message_bytes)
        await eventually(lambda: instance_id in self.engine.workers.attached())
        return worker

    async def member(
        self, instance_id: str, identity: ModelIdentity, max_message_bytes: int = 0
    ) -> ScriptedWorker:
        """Add a member that runs this model, without waiting for the front end to attach."""
        worker = ScriptedWorker(instance_id)
        worker.max_message_bytes = max_message_bytes
        worker.model = identity.key
        self.crashes[instance_id] = await self.stack.enter_async_context(serving(worker))
        known = record(instance_id, worker.address)
        self.members.instances[instance_id] = replace(known, model_identity=identity)
        self.members.changed()
        return worker

    async def crash(self, worker: ScriptedWorker) -> None:
        """Break the worker's connections at once and accept no new ones."""
        self.crashes[worker.instance_id]()

    def count(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 if it has no sample yet."""
        return self.registry.get_sample_value(f"tailrace_frontend_{name}", labels) or 0.0


@pytest.fixture(autouse=True)
def patient_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no scheduler be late that answers: it runs in this process, which may have to wait for a core."""
    monkeypatch.setattr(placement, "_DEADLINE_S", WAIT_S)


@pytest.fixture
def place_wait_s() -> float:
    """How long a request without tokens waits for an instance, or for its turn."""
    return WAIT_S


@pytest.fixture
def limits() -> Limits:
    """Limits of the front end; a test can override them by indirect parametrization."""
    return Limits()


@asynccontextmanager
async def open_rig(
    folder: Path,
    limits: Limits,
    name: str = "f0",
    served: ServedModel | None = None,
    on_models: Callable[[frozenset[str]], None] = lambda models: None,
    waits: WaitLimits | None = None,
) -> AsyncIterator[Rig]:
    """Run a front end without workers."""
    members, channels, registry = StaticMembers(), Channels(), CollectorRegistry()
    async with AsyncExitStack() as stack, FakeApiServer(folder) as front:
        settings = Settings(
            frontend_id=name,
            line=VllmLine(flags={"reasoning_parser": ("tiny",)}),
            wait_limits=waits
            or (WaitLimits(PLACE_WAIT_S) if served is None else WaitLimits(PLACE_WAIT_S, PLACE_WAIT_S)),
            limits=limits,
        )
        engine = FleetEngine(settings, members, channels, folder, registry, None, served, on_models)
        running = asyncio.create_task(engine.run())
        try:
            yield Rig(front, engine, members, AdmissionReader(engine.admission.path), registry, stack)
        finally:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await channels.close()


@pytest.fixture
async def rig(tmp_path: Path, limits: Limits, place_wait_s: float) -> AsyncIterator[Rig]:
    """A running front end without workers."""
    async with open_rig(tmp_path, limits, waits=WaitLimits(place_wait_s)) as running_rig:
        yield running_rig
