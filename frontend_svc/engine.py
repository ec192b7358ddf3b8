"""The engine core that an API server sees: everything of a front end but the API server itself."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from frontend_svc.admission import AdmissionFlag, AdmissionGate
from frontend_svc.answers.desk import AnswerDesk
from frontend_svc.carrier import Carrier
from frontend_svc.engine_core import EngineCoreSocket, HandshakeFailed
from frontend_svc.fair_metrics import FairMetrics
from frontend_svc.links import Loss, Workers
from frontend_svc.observer import FrontendMetrics, RequestTraces, StreamObserver
from frontend_svc.pacing import Pacer
from frontend_svc.placement import Fleet, Members, Placement, ServedModel, may_prefill, usable
from frontend_svc.settings import Limits, Patience
from frontend_svc.streams import StreamTable
from tailrace.cluster import Phase
from tailrace.service.channels import Channels
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

DEFAULT_PATIENCE: Final = Patience()
DEFAULT_LIMITS: Final = Limits()
# Seconds between two looks at all streams.
_TICK_S: Final = 0.5
# An API server that died shows first as a broken socket; its exit status, which says more, comes within this.
_EXIT_WAIT_S: Final = 1.0
# Seconds between two looks at whether all streams have ended.
_POLL_S: Final = 0.05


class ApiServerStuck(Exception):
    """The API server has stopped reading its outputs."""


class FleetEngine:
    """One front end's streams, links and sockets. Nothing happens before `run`."""

    def __init__(
        self,
        frontend_id: str,
        members: Members,
        channels: Channels,
        admission: AdmissionFlag,
        ipc_folder: Path,
        registry: CollectorRegistry,
        traces: RequestTraces | None,
        patience: Patience = DEFAULT_PATIENCE,
        after_prefill: Phase = Phase.REASONING,
        pace_s: float = 0.0,
        limits: Limits = DEFAULT_LIMITS,
        served: ServedModel | None = None,
        on_models: Callable[[frozenset[str]], None] = lambda models: None,
        answers: AnswerDesk | None = None,
    ) -> None:
        """`pace_s` and `answers`: see Carrier; `served`: see Fleet; `on_models` is told the keys of the
        models to whose instances the front end is connected whenever that may have changed. `ipc_folder`
        holds the API server's ROUTER (`in`) and PULL (`out`)."""
        self.fleet = Fleet(members, served)
        self._on_models = on_models
        self._gate = AdmissionGate(admission, patience.new_s)
        self._stuck = asyncio.Event()
        self._first_hello: asyncio.Future[worker_pb2.WorkerHello] = asyncio.get_running_loop().create_future()
        self.table = StreamTable(after_prefill)
        self._socket = EngineCoreSocket(ipc_folder / "in", ipc_folder / "out", self._stuck.set)
        hello = worker_pb2.FrontendHello(
            frontend_id=frontend_id,
            incarnation=uuid.uuid4().hex,
            max_message_bytes=limits.max_message_bytes,
        )
        self.workers = Workers(lambda: self.fleet.instances, hello, self, channels.transport)
        self._placement = Placement(frontend_id, self.fleet, self.workers, self.table, channels)
        self.metrics = FrontendMetrics(registry, self.table, self.workers.attached)
        observer = StreamObserver(self.metrics, traces)
        self.pacer = Pacer(self._socket.send)
        self.carrier = Carrier(
            self.table,
            self.workers,
            self._placement,
            self._socket,
            observer,
            self.pacer,
            patience,
            limits,
            self._gate.update_full,
            pace_s,
            answers,
        )
        if self.carrier.fair is not None:
            FairMetrics(registry, self.carrier.fair)
        self.fleet.add_listener(self._on_membership)

    async def run(self) -> None:
        """Carry streams until cancelled. Raises ApiServerStuck."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.workers.run())
                group.create_task(self._fail_when_stuck())
                group.create_task(self._tick(), name="looks at all streams")
                self._update_admission()
                hello = await self._first_hello
                try:
                    await self._socket.announce(hello.ready_response)
                except (OSError, HandshakeFailed):
                    await asyncio.sleep(_EXIT_WAIT_S)
                    raise
                await self._socket.receive(self.carrier)
        finally:
            self._gate.cancel()
            await self.carrier.close()
            await self._placement.close()
            self._socket.close()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until no stream is left; False: some are after that time."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.table) or self.pacer:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True

    # ---- the links' sink: admission and start-up look at it, then the carrier

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """See LinkSink."""
        if not self._first_hello.done():
            self._first_hello.set_result(hello)
        self.fleet.attached(instance_id, hello)
        self._update_admission()
        self.carrier.on_attached(instance_id, hello)

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        """See LinkSink."""
        self.fleet.lost(instance_id)
        self._update_admission()
        self.carrier.on_lost(instance_id, loss)

    def on_process_gone(self, instance_id: str) -> None:
        """See LinkSink."""
        self.carrier.on_process_gone(instance_id)

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """See LinkSink."""
        if message.HasField("draining"):
            log.info("%s drains", instance_id)
            self.fleet.stopping(instance_id)
            self._update_admission()
            return
        self.carrier.on_message(instance_id, message)

    def _on_membership(self) -> None:
        self.fleet.refresh()
        self.workers.refresh()
        self._update_admission()
        self.carrier.fleet_changed()

    def _update_admission(self) -> None:
        attached = self.workers.attached()
        # Of this model first: suspects count where all of its instances are, whatever the other's are.
        takers = usable(self.fleet, self.fleet.takes_new(attached))
        self._gate.update(len(takers))
        if self.carrier.fair is not None:
            self.carrier.fair.set_instances(len(may_prefill(self.fleet, takers)))
        self._on_models(self.fleet.models_of(attached))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.carrier.tick()

    async def _fail_when_stuck(self) -> None:
        await self._stuck.wait()
        await asyncio.sleep(_EXIT_WAIT_S)
        raise ApiServerStuck("the API server does not read its outputs")
