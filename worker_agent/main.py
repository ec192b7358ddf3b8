"""`tailrace serve worker`: run one engine, or several simulated ones, as members of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import click

from tailrace.numeric import WholeRange
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.runtime import Shutdown, open_service, run_service
from tailrace.service.settings import settings_options
from tailrace.service.sockets import ListenError, require_listenable
from tailrace.service.vllm_line import VllmCommand, read_line
from worker_agent.draining import HANDOVER_S
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engines import EngineOptionError, EngineOptions, make_engine, with_flags
from worker_agent.kv.memory import SharedMemory
from worker_agent.kv.ucx import discarding_strays, start_ucx, stop_ucx
from worker_agent.metrics import WorkerCollector, WorkerHistograms, WorkerMetrics
from worker_agent.network import BindingError, interfaces, rdma_devices, ucx_options, untrusted_reason
from worker_agent.parallel.node_span import worker_span
from worker_agent.registration import IdInUse
from worker_agent.settings import WorkerSettings
from worker_agent.worker import EngineStartError, RunningWorker, running_worker

log = logging.getLogger(__name__)

KIND: Final = "worker"
# Time for announcing the drain, and for work that has no bound of its own.
_MARGIN_S: Final = 10.0


class EngineDied(RuntimeError):
    """An engine failed permanently, or another worker has taken its id."""


@click.command("worker", cls=VllmCommand)
@common_options(KIND)
@settings_options(EngineOptions, "options")
@settings_options(WorkerSettings, "settings")
@click.option(
    "--count",
    type=WholeRange(1, 1000),
    default=1,
    show_default=True,
    help="Workers in this process (simulated only); --id worker-5 starts worker-5, worker-6, ...",
)
def command(
    common: CommonOptions,
    options: EngineOptions,
    settings: WorkerSettings,
    count: int,
    arguments: Sequence[str],
) -> None:
    """Run an engine as a member of the fleet.

    Takes any flag of `vllm serve`; those of the API server alone have no effect here.
    """
    line = read_line(arguments, options.model)
    if settings.kv_address is not None:
        common.check_exposed(f"{settings.kv_address}:0")
    if count > 1 and options.kind != "simulated":
        raise click.UsageError(
            "--count is only for simulated engines: run each vLLM worker in its own process"
        )
    if options.simulated and options.kind != "simulated":
        raise click.UsageError("--sim is only for simulated engines (--engine simulated)")
    if count > 1 and settings.stream_port:
        raise click.UsageError("--stream-port cannot be combined with --count")
    try:
        options = with_flags(options, line)
        if options.kind == "vllm":
            _check_span(options.arguments, common.insecure)
    except (EngineOptionError, EngineSettingError) as error:
        raise click.UsageError(str(error)) from error
    run_service(lambda shutdown: _serve_or_log_error(common, options, count, settings, shutdown))


def _check_span(arguments: Mapping[str, object], insecure: bool) -> None:
    """Raise EngineSettingError if the settings of an engine on several machines do not fit together, and
    EngineOptionError if others could take part in it, or in a data-parallel deployment."""
    span = worker_span(arguments)
    meetings = [] if span is None else [span.meeting]
    if arguments.get("data_parallel_size", 1) != 1:
        # vLLM's default is a loopback address.
        address = str(arguments.get("data_parallel_address", "127.0.0.1"))
        port = arguments.get("data_parallel_rpc_port", 0)
        meetings.append(f"{f'[{address}]' if ':' in address else address}:{port}")
    for meeting in meetings:
        if not insecure and (reason := untrusted_reason(meeting)):
            raise EngineOptionError(reason)


async def _serve_or_log_error(
    common: CommonOptions, options: EngineOptions, count: int, settings: WorkerSettings, shutdown: Shutdown
) -> None:
    """Serve until told to stop or an engine dies; log what an operator can fix as one line.

    Never returns: the process exits as soon as everything is closed. The interpreter would need seconds
    more to unload an engine's modules, in which a supervisor cannot start the worker again.
    """
    status = 0
    if options.unused:
        log.info("of no effect on this engine: %s", ", ".join(options.unused))
    try:
        await serve(common, options, count, settings, shutdown)
    except asyncio.CancelledError:
        log.info("stopped")
    except (BindingError, EngineOptionError, EngineStartError, EngineDied, IdInUse, ListenError) as error:
        log.error("%s", error)
        status = 1
    logging.shutdown()
    os._exit(status)


async def serve(
    common: CommonOptions, options: EngineOptions, count: int, settings: WorkerSettings, shutdown: Shutdown
) -> None:
    """Run `count` workers until cancelled.

    Raise BindingError or ListenError, or EngineDied if an engine failed for good.
    """
    # Both are bound once the engine is loaded, which can take minutes.
    require_listenable("--listen", common.listen)
    require_listenable("--stream-port", f"{common.listen.rpartition(':')[0]}:{settings.stream_port}")
    names = consecutive_ids(common.member_id, count)
    cluster = f"{','.join(common.etcd)}/{common.cluster}"
    # Before etcd is asked: what is wrong with the options is told at once.
    engines = [
        make_engine(
            options,
            lambda late_s: histograms.step_late_seconds.observe(late_s),
            f"{cluster}/{name}",
            settings.profile,
        )
        for name in names
    ]
    async with AsyncExitStack() as stack:
        start_ucx(_ucx_options(common, settings))
        stack.callback(stop_ucx)
        service = await stack.enter_async_context(open_service(KIND, common))
        registry = service.registry
        collector, histograms = WorkerCollector(registry), WorkerHistograms(registry)
        await stack.enter_async_context(discarding_strays(histograms.kv_strays.inc))
        memory = SharedMemory()
        stack.callback(memory.segments.close)
        service.members.add_listener(memory.mappings.drop_gone)
        died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        listen = common.listen
        workers: list[RunningWorker] = []
        for name, engine in zip(names, engines, strict=True):
            metrics = WorkerMetrics(histograms)
            running = await stack.enter_async_context(
                running_worker(name, engine, listen, service, memory, metrics, settings, died)
            )
            # Only the first gets the requested port; the others use any free one.
            listen = f"{listen.rpartition(':')[0]}:0"
            registry.model = running.record.model
            collector.add(metrics, running.stats)
            workers.append(running)

        async def drain() -> None:
            await asyncio.gather(*(worker.drain() for worker in workers))

        with shutdown.draining(drain, settings.drain_timeout_s + HANDOVER_S + _MARGIN_S):
            raise EngineDied(await died)


def _ucx_options(common: CommonOptions, settings: WorkerSettings) -> dict[str, str]:
    host = settings.kv_address or common.listen.rpartition(":")[0]
    options = ucx_options(host, settings.kv_ports, os.environ, interfaces(), rdma_devices())
    log.info("KV transfer: %s", options or "every network device, any port")
    return options


def consecutive_ids(first: str, count: int) -> list[str]:
    """Return `count` ids starting with `first`: worker-5, worker-6; node-08, node-09; worker, worker-1."""
    stem, dash, number = first.rpartition("-")
    if not dash or not (number.isascii() and number.isdecimal()):
        return [first, *(f"{first}-{n}" for n in range(1, count))]
    return [f"{stem}-{int(number) + n:0{len(number)}d}" for n in range(count)]
