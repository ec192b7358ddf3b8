"""The engine core that the API server sees: all of a front end except the API server itself.

Every message arrives here, of the API server and of the instances, and goes to the part that decides about
it: requests.py (a request's way), streams.py (which tokens are accepted), recovery.py (lost instances),
adopt.py (migrations), utilities.py (calls of engine methods).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from frontend_svc.adapters import SharedAdapters
from frontend_svc.admission import CONGESTED, STOPPING, AdmissionFlag, AdmissionGate, Refusal
from frontend_svc.adopt import Adoptions
from frontend_svc.answers.coordinator import AnswerCoordinator
from frontend_svc.api_server.spec import ADAPTER_CALLS
from frontend_svc.engine_core import EngineCoreSocket, HandshakeFailed
from frontend_svc.fair_gate import FairMetrics
from frontend_svc.fleet import ModelFleet, ServedModel
from frontend_svc.links import Loss, WorkerLinks, abort_message
from frontend_svc.liveness import Liveness
from frontend_svc.observer import FrontendMetrics, Load, RequestTraces, StreamObserver, load_of
from frontend_svc.outputs import NamedOutput, Outputs, Unsent
from frontend_svc.pacing import Pacer
from frontend_svc.placement import InstanceChooser
from frontend_svc.recovery import Recovery
from frontend_svc.requests import Requests
from frontend_svc.settings import Settings
from frontend_svc.streams import (
    FINISHED,
    PREFILL_DONE,
    MalformedStep,
    Reject,
    StepVerdict,
    StreamTable,
)
from frontend_svc.tenants import TenantUsage
from frontend_svc.utilities import UtilityCalls
from tailrace.cluster import Phase
from tailrace.members import Members
from tailrace.service.channels import Channels
from tailrace.service.tasks import first_ended, supervised
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import stats_outputs
from tailrace.wire.ready import read_ready
from tailrace.wire.requests import UtilityCall

log = logging.getLogger(__name__)

# Seconds between two periodic checks of all streams.
_TICK_S: Final = 0.5
# A dead API server shows first as a broken socket; its exit status, which says more, follows within this
# time.
_EXIT_WAIT_S: Final = 1.0
# A request whose outputs could not be sent more often than this ends.
MAX_CONGESTED: Final = 3
# Bytes that the API server has not read: beyond the first, new requests are refused; beyond the second,
# streams end, so that the rest can go on.
UNREAD_FULL_BYTES: Final = 64 << 20
UNREAD_MAX_BYTES: Final = 512 << 20
# Seconds between two checks whether all streams have ended.
_POLL_S: Final = 0.05


class ApiServerStuck(Exception):
    """The API server has stopped reading its outputs."""


class FleetEngine:
    """Own one front end's streams, links and sockets. Nothing happens before `run`."""

    def __init__(
        self,
        settings: Settings,
        members: Members,
        channels: Channels,
        ipc_folder: Path,
        registry: CollectorRegistry,
        traces: RequestTraces | None,
        served: ServedModel | None = None,
        on_models: Callable[[frozenset[str]], None] = lambda models: None,
        answers: AnswerCoordinator | None = None,
        adapters: SharedAdapters | None = None,
        tenants: TenantUsage | None = None,
    ) -> None:
        """Build the parts; `run` starts them.

        `served`: see ModelFleet; `answers`: None if no answers are kept; `adapters`: None
        if those that users load are not shared; `tenants`: see Requests. `on_models(keys)` is called with the
        keys of the models that the front end is connected to whenever they may have changed. `ipc_folder`
        holds what an API server needs: its ROUTER (`in`) and PULL (`out`) sockets, and the admission state.
        """
        self.ipc_folder = ipc_folder
        self.admission = AdmissionFlag(ipc_folder / "admission")
        self.adapters = adapters
        self.fleet = ModelFleet(members, served)
        self._max_streams = settings.limits.max_streams
        self._on_models = on_models
        self._on_demand = on_demand = settings.wait_limits.instance_s > 0.0
        self._gate = AdmissionGate(self.admission, settings.wait_limits.place_s, on_demand)
        self._stuck = asyncio.Event()
        self._expects_api_server = asyncio.Event()
        if not settings.on_demand:
            self._expects_api_server.set()
        self._first_hello: asyncio.Future[worker_pb2.WorkerHello] = asyncio.get_running_loop().create_future()
        # What the attached instances last said of their engines.
        self._engines: dict[str, worker_pb2.EngineState] = {}
        self.table = table = StreamTable(Phase.REASONING if settings.reasons else Phase.ANSWERING)
        self._socket = EngineCoreSocket(ipc_folder / "in", ipc_folder / "out", self._stuck.set)
        hello = worker_pb2.FrontendHello(
            frontend_id=settings.frontend_id,
            incarnation=uuid.uuid4().hex,
            max_message_bytes=settings.limits.max_message_bytes,
        )
        self.workers = workers = WorkerLinks(lambda: self.fleet.instances, hello, self, channels.transport)
        self._chooser = chooser = InstanceChooser(settings.frontend_id, self.fleet, workers, table, channels)
        self.metrics = FrontendMetrics(registry, table, workers.attached)
        self._observer = observer = StreamObserver(self.metrics, traces)
        output = NamedOutput(self._socket.send, self._socket.unread_bytes)
        self.pacer = Pacer(output.send)
        self.outputs = outputs = Outputs(output, self.pacer, answers)
        self.requests = requests = Requests(
            table, chooser, workers, outputs, observer, settings, self._gate.update_full, tenants
        )
        self._recovery = Recovery(table, requests, workers, observer.engine_died)
        self._adoptions = Adoptions(table, workers, observer.adopted, self.fleet.is_model)
        self._liveness = Liveness(table, workers)
        self._utilities = UtilityCalls(workers, outputs.reply)
        if answers is not None:
            answers.bind(outputs, requests.end_request)
        if requests.fair_gate is not None:
            FairMetrics(registry, requests.fair_gate)
        self.fleet.add_listener(self._on_membership)

    async def run(self) -> None:
        """Serve streams until cancelled. Raise ApiServerStuck, OSError or HandshakeFailed."""
        try:
            async with supervised({"worker links": self.workers.run, "periodic checks": self._tick}):
                await first_ended(self._serve(), self._fail_when_stuck())
        finally:
            self._gate.cancel()
            self._adoptions.close()
            self._utilities.close()
            await self.outputs.close()
            await self.requests.close()
            await self._chooser.close()
            self._socket.close()

    @property
    def context_tokens(self) -> int:
        """Return the length of the model's context; 0 if no instance has said it yet."""
        if not self._first_hello.done():
            return 0
        return read_ready(self._first_hello.result().ready_response).max_model_len

    def expect_api_server(self) -> None:
        """Connect to an API server that is started on demand: it runs from now on."""
        self._expects_api_server.set()

    async def _serve(self) -> None:
        self._update_admission()
        await self._expects_api_server.wait()
        async with supervised({"first instance": self._ask_for_first} if self._on_demand else {}):
            hello = await self._first_hello
        try:
            await self._socket.announce(hello.ready_response)
        except (OSError, HandshakeFailed):
            await asyncio.sleep(_EXIT_WAIT_S)
            raise
        async with supervised({"fleet statistics": self._tell_stats}):
            await self._socket.receive(self.requests.admit, self._on_abort, self._on_utility)

    async def _ask_for_first(self) -> None:
        """Ask for an instance until one has said what the API server has to know of its engine."""
        while not self._first_hello.done():
            await self._chooser.ask_for_first()
            await asyncio.sleep(_TICK_S)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no stream is left; return False if some are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.table) or self.pacer:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True

    def end_streams(self) -> None:
        """End all streams with an error: this front end is about to exit.

        Kept answers are left: their clients get the rest from another front end, and an error would be the
        end.
        """
        if not self.outputs.keeps_answers:
            self.requests.end_each(self.table, STOPPING, "the front end stops")

    # ---- from the API server

    def _on_abort(self, request_ids: Sequence[str]) -> None:
        """Free requests whose clients disconnected, or for which the API server found a stop string."""
        for name in request_ids:
            self.requests.abort(name)
        self._adoptions.check_pending()

    def _on_utility(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """Answer a call of an engine-core method, by an output message."""
        if self.outputs.handle_call(call):
            return
        if self.adapters is not None and call.method in ADAPTER_CALLS:
            self.adapters.handle_call(call, self.outputs.reply)
        else:
            self._utilities.call(call, frames)

    # ---- from instances (LinkEvents)

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        if not self._first_hello.done():
            self._first_hello.set_result(hello)
        self.fleet.attached(instance_id, hello)
        self._update_admission()
        self._recovery.attached(instance_id, hello.incarnation)
        self._utilities.instance_attached(instance_id)
        self.requests.fleet_changed()

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        self.fleet.lost(instance_id)
        self._update_admission()
        self._utilities.instance_lost(instance_id)
        self._liveness.lost(instance_id)
        self._engines.pop(instance_id, None)
        self._observer.lost(self._recovery.instance_lost(instance_id, loss), instance_id, loss.reason)
        self._adoptions.target_lost(instance_id)
        self._adoptions.check_pending()

    def on_process_gone(self, instance_id: str) -> None:
        self._recovery.process_gone(instance_id)

    def on_silence_explained(self, instance_id: str) -> None:
        self._recovery.silence_explained(instance_id)

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        match message.WhichOneof("body"):
            case "outputs":
                self._on_step(instance_id, message.outputs)
            case "adopt":
                self._adoptions.request(instance_id, message.adopt)
            case "ownership_query":
                self._adoptions.answer_ownership_query(instance_id, message.ownership_query)
            case "returned":
                self.requests.returned(instance_id, message.returned)
            case "utility":
                self._utilities.result(instance_id, message.utility)
            case "held_reply":
                self._on_held_reply(instance_id, message.held_reply)
            case "taken":
                self.table.confirm_on_engine(instance_id, message.taken.handle, message.taken.epoch)
            case "rejected":
                self._on_request_rejected(instance_id, message.rejected)
            case "heartbeat":
                said = message.heartbeat
                self._liveness.heartbeat_received(instance_id, said.steps, said.running, time.monotonic())
                if said.HasField("engine"):
                    self._engines[instance_id] = said.engine
            case "draining":
                log.info("%s drains", instance_id)
                self.fleet.mark_draining(instance_id)
                self._update_admission()
            case body:
                log.warning("unexpected %s from %s", body, instance_id)

    def _on_step(self, instance_id: str, step: worker_pb2.StepOutputs) -> None:
        """Accept what the rule allows of a step's outputs, and send it on."""
        try:
            verdict = self.table.accept(instance_id, step)
        except MalformedStep as error:
            # It is unknown which tokens belong to which stream, so everything that the instance owns restarts
            # on a new connection.
            log.error("malformed outputs from %s: %s", instance_id, error)
            self.workers.reconnect(instance_id, f"malformed outputs: {error}")
            return
        self._liveness.step_received(instance_id, step.step, time.monotonic())
        self.outputs.instance_heard()
        try:
            self.outputs.forward(instance_id, step, verdict)
        except Unsent as error:
            self._fail_unreadable(instance_id, step, verdict, error.unsent, error)
        except Exception as error:  # noqa: BLE001 - whatever a worker's bytes lead to
            accepted = verdict.keep or [True] * len(step.handles)
            self._fail_unreadable(instance_id, step, verdict, accepted, error)
        for stream, flags in verdict.flagged:
            if flags & FINISHED:
                self.requests.finished(stream)
            elif flags & PREFILL_DONE:
                self.requests.prefilled(stream)
        self._observer.accepted(verdict)
        if verdict.rejected:
            self._on_rejected_outputs(instance_id, verdict)
        self._recovery.check_progress()
        self._adoptions.check_pending()

    def _fail_unreadable(
        self,
        instance_id: str,
        step: worker_pb2.StepOutputs,
        verdict: StepVerdict,
        unsent: Sequence[bool],
        error: Exception,
    ) -> None:
        """End streams whose tokens were accepted but whose output payload cannot be decoded.

        The tokens are lost, so ending with an error is the only alternative to a gap in the answer.
        """
        unreadable("outputs of a worker", instance_id, error)
        finished = {stream.handle: stream for stream, _ in verdict.flagged}
        for handle, lost in zip(step.handles, unsent, strict=True):
            stream = self.table.get(handle) or finished.get(handle)
            if lost and stream is not None:
                self.workers.send(instance_id, abort_message([handle]))
                self.requests.give_up(stream, "unreadable outputs")

    def _on_rejected_outputs(self, instance_id: str, verdict: StepVerdict) -> None:
        stale = [
            handle
            for handle, reason in verdict.rejected
            if reason is Reject.UNKNOWN or reason is Reject.NOT_OWNER
        ]
        if stale:
            # An abort carries only the handle; an instance that does not own the stream must keep nothing of
            # it.
            self.workers.send(instance_id, abort_message(stale))
        if verdict.failed:
            self._observer.failed(verdict.failed, instance_id)
            self._recovery.restart_failed(verdict.failed, instance_id)

    def _on_held_reply(self, instance_id: str, reply: worker_pb2.HeldReply) -> None:
        """Restart streams that an instance owns but does not have any more."""
        for handle, epoch in zip(reply.missing_handles, reply.missing_epochs, strict=False):
            stream = self.table.get(handle)
            if stream is None or stream.owner != instance_id or stream.epoch != epoch:
                continue
            log.error("%s no longer has %s", instance_id, stream.request_id)
            self.table.orphan_failed(stream)
            self._observer.missing(stream, instance_id)
            self._recovery.restart_failed([stream], instance_id)

    def _on_request_rejected(self, instance_id: str, rejected: worker_pb2.RequestRejected) -> None:
        """Place a rejected request elsewhere, or end it if it is at fault itself."""
        stream = self.table.get(rejected.handle)
        if stream is None or stream.owner != instance_id or stream.epoch != rejected.epoch:
            return
        congested = rejected.code == worker_pb2.REJECT_CODE_CONGESTED
        stream.congested += congested
        if congested and stream.congested > MAX_CONGESTED:
            self.requests.end_congested(stream, rejected.reason)
        elif congested or rejected.code == worker_pb2.REJECT_CODE_BUSY:
            self._observer.instance_busy(instance_id)
            self._recovery.instance_busy(stream, instance_id)
        elif rejected.code == worker_pb2.REJECT_CODE_FAILED:
            self.table.orphan_failed(stream)
            self._observer.failed([stream], instance_id)
            self._recovery.restart_failed([stream], instance_id, rejected.reason)
        else:
            # No other instance would accept it.
            refusal = Refusal(400, f"The request failed: {rejected.reason}.")
            self.requests.end_for_good(stream, refusal, rejected.reason)

    # ---- the fleet, and periodic work

    def _on_membership(self) -> None:
        self.fleet.refresh()
        self.workers.refresh()
        self._update_admission()
        self.requests.fleet_changed()

    def _update_admission(self) -> None:
        attached = self.workers.attached()
        # Filter by model first: suspects are usable if all instances of this model are suspects, whatever
        # others are.
        accepting = self.fleet.usable(self.fleet.accepting_new(attached))
        self._gate.update(len(accepting))
        if self.requests.fair_gate is not None:
            prefilling = len(self.fleet.prefilling(accepting))
            # Without an instance, some must ask for one.
            self.requests.fair_gate.set_instances(max(prefilling, self._on_demand))
        self._on_models(self.fleet.models_of(attached))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick()

    def tick(self) -> None:
        """Run the periodic checks. Called every half second."""
        self._liveness.tick(time.monotonic())
        self._recovery.tick()
        self.outputs.tick()
        unread_bytes = self.outputs.unread_bytes
        if unread_bytes > UNREAD_MAX_BYTES:
            newest = list(self.table)[len(self.table) // 2 :]
            log.warning("the API server has not read %d bytes: %d streams end", unread_bytes, len(newest))
            self.requests.end_each(newest, CONGESTED, "the API server does not read")
        full = len(self.table) >= self._max_streams or unread_bytes > UNREAD_FULL_BYTES
        self._gate.update_full(full)

    async def _tell_stats(self) -> None:
        """Send the API server what an engine core would say of its load, whenever it has changed.

        Not to one that does not read: for that it is given up only if it misses tokens.
        """
        told = Load()
        while True:
            load = load_of(self.table, self._engines)
            if load != told and not self._socket.unread_bytes():
                self._socket.send(stats_outputs(load.running, load.waiting, load.kv_usage))
                told = load
            await asyncio.sleep(_TICK_S)

    async def _fail_when_stuck(self) -> None:
        await self._stuck.wait()
        await asyncio.sleep(_EXIT_WAIT_S)
        raise ApiServerStuck("the API server is gone, or has read nothing for ten minutes")
