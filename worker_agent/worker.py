"""Assemble and run one worker: engine, front ends, KV transport, migrations, reports and membership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tailrace.intra.guarded import order_asked
from tailrace.intra.registry import UnknownIntraError
from tailrace.perf.transfer_rate import TransferRate
from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import first_address, preferred
from tailrace.service.message_stream import StreamAccess as StreamAdmission
from tailrace.service.message_stream import serve_streams
from tailrace.service.options import new_incarnation
from tailrace.service.runtime import ServiceContext
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.tasks import Loop, supervised
from tailrace.v1 import worker_pb2
from tailrace.v1.bidask_pb2_grpc import add_BidAskServicer_to_server
from tailrace.v1.cache_pb2_grpc import add_CacheServicer_to_server
from tailrace.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from worker_agent.bidask.coordinator import BidAskServicer, coordinator_of
from worker_agent.cache_servicer import CacheServicer
from worker_agent.dispatch import AdmissionControl, AttachStreams, Dispatcher, refusal_message
from worker_agent.draining import Draining, Returns
from worker_agent.engine.base import Engine, EngineStats, RequestStats
from worker_agent.engines import kv_transport
from worker_agent.faults import Faults
from worker_agent.frontends import FrontEnds, send_heartbeats
from worker_agent.intra_switch import IntraSwitch, hung_before, restart_without
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.memory import SharedMemory
from worker_agent.load import Heartbeats, MigrationLoad
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.copying import LinkBudget
from worker_agent.migration.export_call import SourceLink
from worker_agent.migration.source import Exports, MigrationParts
from worker_agent.migration.target import Imports
from worker_agent.prefixes import Copies, LoanLink, Loans, PullParts, Pulls, prompt_of
from worker_agent.profiling.probes import Probes, own_stats, without_probes
from worker_agent.profiling.profiler import Profiler
from worker_agent.progress import StepBounds, StepProgress, watch_progress
from worker_agent.registration import (
    Addressee,
    instance_record,
    register_instance,
    replaced_message,
    wait_until_free,
)
from worker_agent.reports import PhaseEvents, ReportStream
from worker_agent.running_requests import RunningRequests
from worker_agent.servicer import WorkerServicer
from worker_agent.settings import WorkerSettings
from worker_agent.sink import FrontEndSink
from worker_agent.spans import TransferSpans
from worker_agent.speeds import KnownSpeeds, slo_tpot_s

log = logging.getLogger(__name__)

# A front end from which nothing arrives for this long is disconnected.
_SILENCE_S: Final = 10.0


class EngineStartError(Exception):
    """The engine cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves."""

    record: InstanceRecord
    # Statistics of users' requests, without probes.
    stats: Callable[[], EngineStats]
    # Hands over all of its requests, so that it can stop.
    drain: Callable[[], Coroutine[None, None, None]]
    # Tells front ends, for this reason, that it leaves; from any thread.
    say_goodbye: Callable[[str], None]


@asynccontextmanager
async def running_worker(
    instance_id: str,
    engine: Engine,
    listen: str,
    service: ServiceContext,
    memory: SharedMemory,
    metrics: WorkerMetrics,
    settings: WorkerSettings,
    died: asyncio.Future[str],
) -> AsyncIterator[RunningWorker]:
    """Start the engine, serve and join the fleet; leave and stop when the block ends. UCX must be started.

    `died` gets the reason when the engine fails for good or another worker takes over the id; the caller then
    exits the process. Raise IdInUse, EngineStartError, ListenError or StoreUnavailable.
    """
    await wait_until_free(service.store, instance_id)
    async with AsyncExitStack() as stack:
        worker = _WorkerBuilder(instance_id, engine, service, memory, metrics, settings, died, stack)
        await worker.start_engine()
        await worker.connect_kv()
        worker.open_migrations()
        worker.open_requests()
        worker.open_bidding()
        await worker.open_profiler()
        await worker.serve(listen)
        await worker.run_background()
        yield await worker.join()


class _WorkerBuilder:
    """Build a worker step by step, in the order of the methods; each needs the ones before it.

    What a step opens, the stack closes in reverse order.
    """

    def __init__(
        self,
        instance_id: str,
        engine: Engine,
        service: ServiceContext,
        memory: SharedMemory,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        died: asyncio.Future[str],
        stack: AsyncExitStack,
    ) -> None:
        self._instance_id = instance_id
        self._engine = engine
        self._service = service
        self._memory = memory
        self._metrics = metrics
        self._settings = settings
        self._died = died
        self._stack = stack
        self._own = Addressee(instance_id, new_incarnation())
        self._faults = Faults.from_environment(instance_id)
        self._front_ends = FrontEnds()
        self._running = RunningRequests(lambda: service.members.slo.reading_s)
        self._events = PhaseEvents()
        self._incoming = TransferRate()

    async def start_engine(self) -> None:
        """Start the engine with its outputs going to the front ends. Raise EngineStartError."""
        users = FrontEndSink(
            self._front_ends,
            self._running,
            self._events,
            self._metrics,
            self._on_dead,
            lambda key: self._dispatch.give_up(key),
        )
        self._sink = Probes(users, asyncio.get_running_loop().time)
        try:
            self._info = await self._engine.start(self._sink)
        except RuntimeError as error:
            raise EngineStartError(f"{self._instance_id}: {error}") from error
        self._stack.push_async_callback(self._engine.stop)
        members = self._service.members
        self._intra_switch = IntraSwitch(
            self._settings.intra,
            lambda: members.policy,
            lambda: members.slo,
            self._engine.set_intra,
            hung_before(),
        )
        try:
            await self._intra_switch.update()
        except UnknownIntraError as error:
            raise EngineStartError(f"--intra: {error}") from error
        self._metrics.order_hangs = lambda: self._intra_switch.refuses_hung
        members.add_listener(self._intra_switch.changed)

    async def connect_kv(self) -> None:
        """Open the KV transport and prefix pulls over it. Raise EngineStartError."""
        try:
            self._transport = await kv_transport(
                self._instance_id,
                self._engine,
                self._info,
                self._memory,
                self._faults,
                self._metrics,
                self._settings.encrypt_kv,
            )
        except KvTransferError as error:
            raise EngineStartError(f"{self._instance_id}: {error}") from error
        self._stack.push_async_callback(self._transport.close)
        self._spans = TransferSpans(self._service.tracing, self._instance_id)
        self._pulls = Pulls(
            PullParts(
                engine=self._engine,
                shape=self._info.kv_shape,
                puller=self._transport,
                connect=lambda address, request, seconds: LoanLink(
                    self._service.channels.get(address, Role.WORKER), request, seconds
                ),
                metrics=self._metrics,
                faults=self._faults,
                spans=self._spans,
                incoming=self._incoming,
                timeout_s=self._settings.pull_timeout_s,
            )
        )
        self._stack.push_async_callback(self._pulls.close)

    def open_migrations(self) -> None:
        """Create both ends of migrations."""
        self._admission = AdmissionControl(
            self._pulls.submit,
            self._front_ends,
            self._running,
            self._metrics,
            self._settings.max_requests,
            lambda: self._instance_id in self._service.members.drained,
        )
        parts = MigrationParts(
            own=self._own,
            engine=self._engine,
            info=self._info,
            blocks=self._transport,
            puller=self._transport,
            front_ends=self._front_ends,
            running=self._running,
            events=self._events,
            metrics=self._metrics,
            faults=self._faults,
            spans=self._spans,
            settings=self._settings,
            resubmit=self._admission.submit,
            link=LinkBudget(self._settings.migration_bandwidth_share),
            incoming=self._incoming,
        )
        self._exports = Exports(parts)
        self._stack.push_async_callback(self._exports.close)
        self._imports = Imports(
            parts,
            lambda address, seconds: SourceLink(self._service.channels.get(address, Role.WORKER), seconds),
        )
        self._stack.push_async_callback(self._imports.close)

    def open_requests(self) -> None:
        """Connect front ends' messages to the engine, and prepare draining."""
        self._dispatch = Dispatcher(
            self._engine,
            self._admission,
            self._exports,
            self._imports,
            self._pulls,
            self._running,
            self._events,
            self._metrics,
        )
        self._stack.push_async_callback(self._dispatch.close)
        self._front_ends.on_gone(self._dispatch.front_end_gone)
        self._hello = worker_pb2.WorkerHello(
            instance_id=self._instance_id,
            incarnation=self._own.incarnation,
            ready_response=self._info.ready_response,
            max_message_bytes=self._settings.max_message_bytes,
            model=self._info.identity.key,
        )
        self._returns = Returns(self._stats, self._running, self._front_ends, self._exports.open)
        self._draining = Draining(
            self._instance_id,
            lambda: self._instance_id in self._service.members.draining,
            self._returns,
            self._running,
            self._exports,
            self._imports,
            self._front_ends,
            self._hello,
        )

    def open_bidding(self) -> None:
        """Create the bid-ask coordinator."""
        self._coordinator = coordinator_of(
            self._own,
            self._engine,
            self._info.kv_shape.block_tokens,
            self._running,
            self._imports,
            self._service.channels,
            lambda: first_address(self._service.members, "migration"),
            self._metrics,
            lambda: self._draining.active,
        )
        self._stack.push_async_callback(self._coordinator.close)

    async def open_profiler(self) -> None:
        """Create the profiler; profile the engine now if the settings say so."""
        tpot_s = partial(slo_tpot_s, self._service.members)
        self._profiler = Profiler(
            self._instance_id,
            self._engine,
            self._info,
            self._sink,
            self._running,
            self._service.store,
            tpot_s,
            self._intra_switch.set_aside,
        )
        if self._settings.profile_at_start:
            await self._profiler.at_start()

    async def serve(self, listen: str) -> None:
        """Serve gRPC and the streams of front ends. Raise ListenError."""
        transport = self._service.channels.transport
        loans = Loans(self._engine, self._info.kv_shape, self._transport, self._faults)
        prompt = partial(prompt_of, self._service.channels)
        copies = Copies(self._pulls, prompt, lambda: len(self._imports), self._metrics)
        servicers = [
            Servicer(
                add_WorkerServicer_to_server,
                WorkerServicer(self._own, self._exports, self._imports, self._returns, self._profiler),
                "tailrace.v1.Worker",
            ),
            Servicer(add_BidAskServicer_to_server, BidAskServicer(self._coordinator), "tailrace.v1.BidAsk"),
            Servicer(
                add_CacheServicer_to_server,
                CacheServicer(self._own, self._info.cache, self._engine, loans, copies),
                "tailrace.v1.Cache",
            ),
        ]
        self._server = await self._stack.enter_async_context(serve_grpc(listen, servicers, transport))
        streams = AttachStreams(self._front_ends, self._dispatch, self._hello)
        stream_address = await self._stack.enter_async_context(
            serve_streams(
                f"{listen.rpartition(':')[0]}:{self._settings.stream_port}",
                worker_pb2.AttachUp,
                streams.serve_stream,
                self._settings.max_message_bytes,
                StreamAdmission(transport, frozenset({Role.FRONTEND}), refusal_message),
            )
        )
        stopping = worker_pb2.Goodbye(reason="the worker is stopping")
        self._stack.push_async_callback(self._front_ends.leave, stopping)
        advertised = self._service.common.advertised
        self._address = advertised(self._server.address)
        self._stream_address = advertised(stream_address)
        self._coordinator.address = self._address

    async def run_background(self) -> None:
        """Start the tasks that run as long as the worker does."""
        settings = self._settings
        bounds = StepBounds(settings.step_floor_s, settings.step_limit_s)
        progress = StepProgress(bounds, asyncio.get_running_loop().time())
        heartbeats = Heartbeats(progress, self._stats)
        loops: dict[str, Loop] = {
            "heartbeats": lambda: send_heartbeats(self._front_ends, _SILENCE_S, heartbeats),
            "reports": self._reports().run,
            "progress": lambda: watch_progress(self._engine.stats, progress, self._on_stuck),
            "draining": self._draining.run,
            "batch order": self._intra_switch.run,
        }
        await self._stack.enter_async_context(supervised(loops))

    async def join(self) -> RunningWorker:
        """Join the fleet. Raise IdInUse or StoreUnavailable."""
        record = instance_record(
            self._instance_id,
            self._own.incarnation,
            self._address,
            self._stream_address,
            self._service.common.advertised(self._service.metrics_address),
            self._info,
            # A profile from the command line takes precedence over measured ones.
            "" if self._settings.profile is not None else self._profiler.kind,
        )
        store = self._service.store
        # Loading a model takes minutes, in which another worker may have taken the id.
        await wait_until_free(store, self._instance_id, own_address=self._address)
        registration = await register_instance(store, record)
        registration.on_replaced(self._on_replaced)
        self._stack.push_async_callback(registration.withdraw)
        log.info("%s serves %s at %s", self._instance_id, self._info.model, self._address)

        async def drain() -> None:
            await self._draining.stop(
                self._settings.drain_timeout_s, self._server.set_serving, registration, record
            )

        return RunningWorker(record, self._stats, drain, self._say_goodbye)

    def _reports(self) -> ReportStream:
        speeds = KnownSpeeds(self._info.profile, self._settings, self._profiler.kind, self._service.members)
        return ReportStream(
            self._instance_id,
            self._own.incarnation,
            self._info.kv_shape.block_tokens,
            self._stats,
            self._request_stats,
            lambda: MigrationLoad(self._imports.with_room, len(self._exports), self._incoming.bytes_per_s),
            self._running,
            self._events,
            speeds.current,
            lambda: [record.address for record in preferred(self._service.members, "monitor")],
            self._service.channels,
            self._settings.report_s,
            self._info.cache,
        )

    def _stats(self) -> EngineStats:
        return own_stats(self._engine.stats(), self._sink)

    def _request_stats(self, request_ids: Iterable[str]) -> list[RequestStats]:
        return without_probes(self._engine.request_stats(request_ids))

    def _on_stuck(self, reason: str) -> None:
        if (asked := order_asked()) is not None:
            # Sooner than its watch, which counts little of the time of a busy machine.
            restart_without(asked, f"and {reason}", self._say_goodbye)
        self._engine.fail(reason)

    def _on_dead(self, reason: str) -> None:
        # Immediately: a hanging engine may delay the exit of this process.
        log.error("%s: %s", self._instance_id, reason)
        self._front_ends.send_goodbye(worker_pb2.Goodbye(engine_failed=True, reason=reason))
        if not self._died.done():
            self._died.set_result(f"{self._instance_id}: {reason}")

    def _on_replaced(self, value: bytes) -> None:
        reason = replaced_message(self._instance_id, value)
        log.error("%s", reason)
        self._say_goodbye(reason)
        if not self._died.done():
            self._died.set_result(reason)

    def _say_goodbye(self, reason: str) -> None:
        self._front_ends.send_goodbye(worker_pb2.Goodbye(reason=reason))
