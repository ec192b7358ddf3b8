"""Run one worker, or several simulated ones, from start to end."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import Final

from tailrace.service.options import CommonOptions
from tailrace.service.runtime import Shutdown, ending_process, exit_within_grace, open_service
from tailrace.service.sockets import ListenError, require_listenable
from worker_agent.draining import HANDOVER_S
from worker_agent.engines import make_engine
from worker_agent.intra_switch import hung_before, watched_orders
from worker_agent.kv.memory import SharedMemory
from worker_agent.kv.ucx import discarding_strays, start_ucx, stop_ucx
from worker_agent.metrics import WorkerCollector, WorkerHistograms, WorkerMetrics
from worker_agent.network import BindingError, interfaces, rdma_devices, ucx_options
from worker_agent.parallel.rank_leftovers import private_sockets
from worker_agent.registration import IdInUse
from worker_agent.settings import EngineOptionError, EngineOptions, WorkerSettings
from worker_agent.worker import EngineStartError, RunningWorker, running_worker

log = logging.getLogger(__name__)

_KIND: Final = "worker"
# Time for announcing the drain, and for work that has no bound of its own.
_MARGIN_S: Final = 10.0


class EngineDied(RuntimeError):
    """An engine failed permanently, or another worker has taken its id."""


async def serve_or_log_error(
    common: CommonOptions, options: EngineOptions, count: int, settings: WorkerSettings, shutdown: Shutdown
) -> None:
    """Serve until told to stop or an engine dies; log what an operator can fix as one line.

    Never returns: the process exits as soon as everything is closed.
    """
    if options.unused:
        log.info("of no effect on this engine: %s", ", ".join(options.unused))
    expected = (BindingError, EngineOptionError, EngineStartError, EngineDied, IdInUse, ListenError)
    with ending_process(*expected), private_sockets():
        await serve(common, options, count, settings, shutdown)


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
    # Before etcd is asked: what is wrong with the options is told at once.
    engines = [
        make_engine(
            options,
            lambda late_s: histograms.step_late_seconds.observe(late_s),
            settings.profile,
        )
        for _ in names
    ]
    async with AsyncExitStack() as stack:
        start_ucx(_ucx_options(common, settings))
        stack.callback(stop_ucx)
        service = await stack.enter_async_context(open_service(_KIND, common))
        registry = service.registry
        collector, histograms = WorkerCollector(registry), WorkerHistograms(registry)
        await stack.enter_async_context(discarding_strays(histograms.kv_strays.inc))
        memory = SharedMemory()
        stack.callback(memory.segments.close)
        service.members.add_listener(memory.mappings.drop_gone)
        workers: list[RunningWorker] = []

        def say_goodbye(reason: str) -> None:
            for worker in workers:
                worker.say_goodbye(reason)

        stack.enter_context(watched_orders(say_goodbye))
        if hung := hung_before():
            log.error("order %s is not used until this worker is started anew: it did not return", hung)
        died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # What is closed then may wait for an engine that hangs.
        died.add_done_callback(lambda _: exit_within_grace())
        listen = common.listen
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
