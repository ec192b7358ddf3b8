"""The engine core that the API server sees: all of a front end except the API server itself."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from frontend_svc.adapters import SharedAdapters
from frontend_svc.admission import AdmissionFlag, AdmissionGate
from frontend_svc.answers.coordinator import AnswerCoordinator
from frontend_svc.carrier import Carrier
from frontend_svc.engine_core import EngineCoreSocket, HandshakeFailed
from frontend_svc.fair_metrics import FairMetrics
from frontend_svc.fleet import Fleet, Members, ServedModel, prefill_instances, usable_instances
from frontend_svc.links import Loss, WorkerLinks
from frontend_svc.load import Load, load_of
from frontend_svc.names import NamedOutput
from frontend_svc.observer import FrontendMetrics, RequestTraces, StreamObserver
from frontend_svc.pacing import Pacer
from frontend_svc.placement import Placement
from frontend_svc.settings import Limits, WaitLimits
from frontend_svc.streams import StreamTable
from tailrace.cluster import Phase
from tailrace.service.channels import Channels
from tailrace.service.tasks import first_ended, supervised
from tailrace.v1 import worker_pb2
from tailrace.wire import stats_outputs

log = logging.getLogger(__name__)

DEFAULT_WAIT_LIMITS: Final = WaitLimits()
DEFAULT_LIMITS: Final = Limits()
# Seconds between two periodic checks of all streams.
_TICK_S: Final = 0.5
# A dead API server shows first as a broken socket; its exit status, which says more, follows within this
# time.
_EXIT_WAIT_S: Final = 1.0
# Seconds between two checks whether all streams have ended.
_POLL_S: Final = 0.05


class ApiServerStuck(Exception):
    """The API server has stopped reading its outputs."""


class FleetEngine:
    """Own one front end's streams, links and sockets. Nothing happens before `run`."""

    def __init__(
        self,
        frontend_id: str,
        members: Members,
        channels: Channels,
        admission: AdmissionFlag,
        ipc_folder: Path,
        registry: CollectorRegistry,
        traces: RequestTraces | None,
        wait_limits: WaitLimits = DEFAULT_WAIT_LIMITS,
        after_prefill: Phase = Phase.REASONING,
        pace_s: float = 0.0,
        limits: Limits = DEFAULT_LIMITS,
        served: ServedModel | None = None,
        on_models: Callable[[frozenset[str]], None] = lambda models: None,
        answers: AnswerCoordinator | None = None,
        adapters: SharedAdapters | None = None,
    ) -> None:
        """Build the parts; `run` starts them.

        `pace_s`, `answers` and `adapters`: see Carrier; `served`: see Fleet. `on_models(keys)` is called with
        the keys of the models that the front end is connected to whenever they may have changed.
        `ipc_folder` holds the API server's ROUTER (`in`) and PULL (`out`) sockets.
        """
        self.fleet = Fleet(members, served)
        self._on_models = on_models
        self._gate = AdmissionGate(admission, wait_limits.place_s)
        self._stuck = asyncio.Event()
        self._first_hello: asyncio.Future[worker_pb2.WorkerHello] = asyncio.get_running_loop().create_future()
        self.table = StreamTable(after_prefill)
        self._socket = EngineCoreSocket(ipc_folder / "in", ipc_folder / "out", self._stuck.set)
        hello = worker_pb2.FrontendHello(
            frontend_id=frontend_id,
            incarnation=uuid.uuid4().hex,
            max_message_bytes=limits.max_message_bytes,
        )
        self.workers = WorkerLinks(lambda: self.fleet.instances, hello, self, channels.transport)
        self._placement = Placement(frontend_id, self.fleet, self.workers, self.table, channels)
        self.metrics = FrontendMetrics(registry, self.table, self.workers.attached)
        observer = StreamObserver(self.metrics, traces)
        output = NamedOutput(self._socket.send, self._socket.unread_bytes)
        self.pacer = Pacer(output.send)
        self.carrier = Carrier(
            self.table,
            self.workers,
            self._placement,
            output,
            observer,
            self.pacer,
            wait_limits,
            limits,
            self._gate.update_full,
            pace_s,
            answers,
            adapters,
        )
        if self.carrier.fair_gate is not None:
            FairMetrics(registry, self.carrier.fair_gate)
        self.fleet.add_listener(self._on_membership)

    async def run(self) -> None:
        """Serve streams until cancelled. Raise ApiServerStuck, OSError or HandshakeFailed."""
        try:
            async with supervised({"worker links": self.workers.run, "periodic checks": self._tick}):
                await first_ended(self._serve(), self._fail_when_stuck())
        finally:
            self._gate.cancel()
            await self.carrier.close()
            await self._placement.close()
            self._socket.close()

    async def _serve(self) -> None:
        self._update_admission()
        hello = await self._first_hello
        try:
            await self._socket.announce(hello.ready_response)
        except (OSError, HandshakeFailed):
            await asyncio.sleep(_EXIT_WAIT_S)
            raise
        async with supervised({"fleet statistics": self._tell_stats}):
            await self._socket.receive(self.carrier)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no stream is left; return False if some are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.table) or self.pacer:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True

    # ---- LinkSink: update the fleet and admission, then pass on to the carrier

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
            self.fleet.mark_draining(instance_id)
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
        # Filter by model first: suspects are usable if all instances of this model are suspects, whatever
        # others are.
        accepting = usable_instances(self.fleet, self.fleet.accepting_new(attached))
        self._gate.update(len(accepting))
        if self.carrier.fair_gate is not None:
            self.carrier.fair_gate.set_instances(len(prefill_instances(self.fleet, accepting)))
        self._on_models(self.fleet.models_of(attached))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.carrier.tick()

    async def _tell_stats(self) -> None:
        """Send the API server what an engine core would say of its load, whenever it has changed.

        Not to one that does not read: for that it is given up only if it misses tokens.
        """
        told = Load()
        while True:
            load = load_of(self.table, self.carrier.engines)
            if load != told and not self._socket.unread_bytes():
                self._socket.send(stats_outputs(load.running, load.waiting, load.kv_usage))
                told = load
            await asyncio.sleep(_TICK_S)

    async def _fail_when_stuck(self) -> None:
        await self._stuck.wait()
        await asyncio.sleep(_EXIT_WAIT_S)
        raise ApiServerStuck("the API server is gone, or has read nothing for ten minutes")
