"""One worker, put together: engine, front ends, KV transport, migrations, reports, membership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tailrace.perf.transfer_rate import TransferRate
from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, first_address, preferred
from tailrace.service.message_stream import Admission as StreamAdmission
from tailrace.service.message_stream import serve_streams
from tailrace.service.options import fresh_incarnation
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.tasks import task_error
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.telemetry.tracing import Tracing
from tailrace.v1 import worker_pb2
from tailrace.v1.bidask_pb2_grpc import add_BidAskServicer_to_server
from tailrace.v1.cache_pb2_grpc import add_CacheServicer_to_server
from tailrace.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from worker_agent.attach import AttachStreams, refused
from worker_agent.bidask.assembly import BidAskServicer, coordinator_of
from worker_agent.cache_servicer import CacheServicer
from worker_agent.carried import CarriedRequests
from worker_agent.dispatch import Admission, Dispatch
from worker_agent.draining import Draining
from worker_agent.engine.base import Engine, EngineInfo, EngineStats
from worker_agent.engines import kv_transport
from worker_agent.faults import Faults
from worker_agent.frontends import FrontEnds, beat
from worker_agent.hand_backs import HandBacks
from worker_agent.id_claim import replaced_message, wait_until_free
from worker_agent.intra_switch import order_by
from worker_agent.kv.segments import SharedMemory
from worker_agent.load import MigrationLoad
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.exports import Exports
from worker_agent.migration.imports import Imports
from worker_agent.migration.link_budget import LinkBudget
from worker_agent.migration.parts import SourceParts, TargetParts
from worker_agent.migration.source_link import GrpcSourceLink
from worker_agent.migration.spans import TransferSpans
from worker_agent.phase_events import PhaseEvents
from worker_agent.prefixes.loan_link import GrpcLoanLink
from worker_agent.prefixes.loans import Loans
from worker_agent.prefixes.pulls import PullParts, Pulls
from worker_agent.profiling.probes import Probes, own_stats
from worker_agent.profiling.profiler import Profiler
from worker_agent.progress import StepBounds, watch_progress
from worker_agent.registration import instance_record, register_instance
from worker_agent.reports import Reports
from worker_agent.servicer import WorkerServicer
from worker_agent.settings import WorkerSettings
from worker_agent.sink import FrontEndSink
from worker_agent.speeds import KnownSpeeds, slo_tpot_s

log = logging.getLogger(__name__)


class EngineStartError(Exception):
    """The engine does not start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SharedServices:
    """What the workers of one process share."""

    store: Store
    membership: Membership
    channels: Channels
    tracing: Tracing
    # HOST:PORT of /metrics as others reach it.
    metrics_address: str
    # Host that others reach this process by.
    host: str
    memory: SharedMemory


@dataclass(frozen=True, slots=True)
class Running:
    """A worker that serves."""

    instance_id: str
    record: InstanceRecord
    info: EngineInfo
    # Of users' requests alone.
    stats: Callable[[], EngineStats]
    front_ends: FrontEnds
    exports: Exports
    imports: Imports
    # Hands over all that it carries, so that it can end.
    drain: Callable[[], Coroutine[None, None, None]]


@asynccontextmanager
async def running_worker(
    instance_id: str,
    engine: Engine,
    listen: str,
    around: SharedServices,
    metrics: WorkerMetrics,
    settings: WorkerSettings,
    died: asyncio.Future[str],
) -> AsyncIterator[Running]:
    """Start the engine, serve and join the fleet; leave and stop at the end. UCX must be started.

    `died` gets the reason when the engine fails for good, or another worker has taken the id; the caller
    then ends the process. Raises IdInUse, EngineStartError, ListenError, StoreUnavailable.
    """
    incarnation = fresh_incarnation()
    faults = Faults.from_environment(instance_id)
    front_ends, carried = FrontEnds(), CarriedRequests(lambda: around.membership.slo.reading_s)
    news = PhaseEvents()

    def on_dead(reason: str) -> None:
        # At once: an engine that hangs may hold the end of this process up for a while.
        log.error("%s: %s", instance_id, reason)
        front_ends.say_goodbye(worker_pb2.Goodbye(engine_failed=True, reason=reason))
        if not died.done():
            died.set_result(f"{instance_id}: {reason}")

    def on_replaced(value: bytes) -> None:
        reason = replaced_message(instance_id, value)
        log.error("%s", reason)
        front_ends.say_goodbye(worker_pb2.Goodbye(reason=reason))
        if not died.done():
            died.set_result(reason)

    await wait_until_free(around.store, instance_id, settings.lease_ttl_s)
    async with AsyncExitStack() as stack:
        users = FrontEndSink(front_ends, carried, news, metrics, on_dead, lambda key: dispatch.give_up(key))
        sink = Probes(users, asyncio.get_running_loop().time)
        try:
            info = await engine.start(sink)
        except RuntimeError as error:
            raise EngineStartError(f"{instance_id}: {error}") from error
        stack.push_async_callback(engine.stop)
        order_by(settings.intra, engine.set_intra, around.membership)
        shape = info.kv_shape
        transport = await kv_transport(instance_id, engine, info, around.memory, faults, metrics)
        stack.push_async_callback(transport.close)
        incoming, spans = TransferRate(), TransferSpans(around.tracing, instance_id)
        pulls = Pulls(
            PullParts(
                engine=engine,
                shape=shape,
                puller=transport,
                connect=lambda address, request, seconds: GrpcLoanLink(
                    around.channels.get(address, Role.WORKER), request, seconds
                ),
                metrics=metrics,
                faults=faults,
                spans=spans,
                incoming=incoming,
                timeout_s=settings.pull_timeout_s,
            )
        )
        stack.push_async_callback(pulls.close)
        admission = Admission(pulls, front_ends, carried, metrics, settings.max_requests)
        exports = Exports(
            SourceParts(
                engine=engine,
                info=info,
                blocks=transport,
                front_ends=front_ends,
                carried=carried,
                news=news,
                metrics=metrics,
                faults=faults,
                settings=settings,
            )
        )
        stack.push_async_callback(exports.close)
        imports = Imports(
            TargetParts(
                instance_id=instance_id,
                engine=engine,
                info=info,
                puller=transport,
                front_ends=front_ends,
                carried=carried,
                news=news,
                metrics=metrics,
                faults=faults,
                spans=spans,
                settings=settings,
                resubmit=admission.submit,
                link=LinkBudget(settings.migration_bandwidth_share),
                incoming=incoming,
            ),
            lambda address, seconds: GrpcSourceLink(around.channels.get(address, Role.WORKER), seconds),
        )
        stack.push_async_callback(imports.close)
        dispatch = Dispatch(engine, admission, exports, imports, pulls, carried, news, metrics)
        stack.push_async_callback(dispatch.close)
        front_ends.on_gone(dispatch.client_gone)
        hello = worker_pb2.WorkerHello(
            instance_id=instance_id,
            incarnation=incarnation,
            ready_response=info.ready_response,
            max_message_bytes=settings.max_message_bytes,
            model="" if info.identity is None else info.identity.key,
        )

        def stats() -> EngineStats:
            return own_stats(engine.stats(), sink)

        hand_backs = HandBacks(stats, carried, front_ends, exports.open)
        draining = Draining(
            instance_id,
            lambda: instance_id in around.membership.draining,
            hand_backs,
            carried,
            exports,
            imports,
            front_ends,
            hello,
        )
        coordinator = coordinator_of(
            instance_id,
            engine,
            shape.block_tokens,
            carried,
            imports,
            around.channels,
            lambda: first_address(around.membership, "migration"),
            metrics,
            lambda: draining.active,
        )
        stack.push_async_callback(coordinator.close)
        tpot_s = partial(slo_tpot_s, around.membership)
        profiler = Profiler(instance_id, engine, info, sink, carried, around.store, tpot_s)
        if settings.profile_at_start:
            await profiler.at_start()
        worker, bidding = WorkerServicer(exports, imports, hand_backs, profiler), BidAskServicer(coordinator)
        cache = CacheServicer(incarnation, info.cache, Loans(engine, shape, transport, faults))
        servicers = [
            Servicer(add_WorkerServicer_to_server, worker, "tailrace.v1.Worker"),
            Servicer(add_BidAskServicer_to_server, bidding, "tailrace.v1.BidAsk"),
            Servicer(add_CacheServicer_to_server, cache, "tailrace.v1.Cache"),
        ]
        server = await stack.enter_async_context(serve_grpc(listen, servicers, around.channels.transport))
        streams = AttachStreams(front_ends, dispatch, hello)
        stream_address = await stack.enter_async_context(
            serve_streams(
                f"{listen.rpartition(':')[0]}:{settings.stream_port}",
                worker_pb2.AttachUp,
                streams.serve_stream,
                settings.max_message_bytes,
                StreamAdmission(around.channels.transport, frozenset({Role.FRONTEND}), refused),
            )
        )
        stack.push_async_callback(front_ends.leave, worker_pb2.Goodbye(reason="the worker is stopping"))
        address = f"{around.host}:{server.address.rpartition(':')[2]}"
        coordinator.address = address
        speeds = KnownSpeeds(info.profile, settings, profiler.kind, around.membership)
        reports = Reports(
            instance_id,
            incarnation,
            shape.block_tokens,
            stats,
            lambda: MigrationLoad(imports.with_room, len(exports), incoming.bytes_per_s),
            carried,
            news,
            speeds.now,
            lambda: [record.address for record in preferred(around.membership, "monitor")],
            around.channels,
            settings.report_s,
            info.cache,
        )
        for name, work in (
            ("heartbeats", beat(front_ends, settings.frontend_silence_s)),
            ("reports", reports.run()),
            (
                "progress",
                watch_progress(
                    engine.stats, StepBounds(settings.step_floor_s, settings.step_limit_s), on_dead
                ),
            ),
            ("draining", draining.run()),
        ):
            await stack.enter_async_context(_background(name, work, on_dead))
        record = instance_record(
            instance_id,
            incarnation,
            address,
            f"{around.host}:{stream_address.rpartition(':')[2]}",
            around.metrics_address,
            info,
            # What it was given goes before what was measured.
            "" if settings.profile is not None else profiler.kind,
        )
        # Loading a model takes minutes: somebody may have come meanwhile.
        await wait_until_free(around.store, instance_id, settings.lease_ttl_s, address)
        registration = await register_instance(around.store, record, settings.lease_ttl_s)
        registration.on_replaced(on_replaced)
        stack.push_async_callback(registration.withdraw)
        log.info("%s serves %s at %s", instance_id, info.model, address)

        async def drain() -> None:
            await draining.stop(settings.drain_timeout_s, server.set_serving, registration, record)

        yield Running(instance_id, record, info, stats, front_ends, exports, imports, drain)


@asynccontextmanager
async def _background(
    name: str, work: Coroutine[object, object, None], on_dead: Callable[[str], None]
) -> AsyncIterator[None]:
    """A task that runs until the block ends. A worker without it is none: if it fails, `on_dead` is told."""

    def ended(done: asyncio.Task[None]) -> None:
        if (error := task_error(done)) is not None:
            log.error("%s failed", name, exc_info=error)
            on_dead(f"{name} failed: {error}")

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
