"""`tailrace serve worker`: run one engine, or several simulated ones, as members of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import Final

import click

from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import intra_names
from tailrace.numeric import RealRange, WholeRange
from tailrace.profiles import Profile, ProfileError, load_profile
from tailrace.service.channels import Channels
from tailrace.service.listening import ListenError, require_listenable
from tailrace.service.message_stream import MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.runtime import Shutdown, run_service
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.telemetry.metrics import new_registry, serve_metrics
from tailrace.telemetry.tracing import configure
from worker_agent.draining import HANDOVER_S
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engines import EngineOptionError, EngineOptions, make_engine, read_argument
from worker_agent.id_claim import IdInUse
from worker_agent.intra_switch import BY_POLICY
from worker_agent.kv.binding import BindingError, PortRange, interfaces, rdma_devices, ucx_options
from worker_agent.kv.segments import SharedMemory
from worker_agent.kv.strays import discarding_strays
from worker_agent.kv.transport import start_ucx, stop_ucx
from worker_agent.metrics import WorkerCollector, WorkerHistograms, WorkerMetrics
from worker_agent.migration.link_budget import SHARE
from worker_agent.nodes.network import untrusted_reason
from worker_agent.nodes.span import worker_span
from worker_agent.prefixes.loans import LOAN_MAX_S
from worker_agent.settings import WorkerSettings
from worker_agent.worker import EngineStartError, RunningWorker, SharedServices, running_worker

log = logging.getLogger(__name__)

_DEFAULTS: Final = WorkerSettings()
# Time for announcing the drain, and for work that has no bound of its own.
_MARGIN_S: Final = 10.0


class EngineDied(RuntimeError):
    """An engine failed permanently, or another worker has taken its id."""


@click.command("worker")
@common_options("worker")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "simulated"]),
    default="vllm",
    show_default=True,
    help="Engine.",
)
@click.option("--model", help="Model; by default the tiny one that ships with Tailrace.")
@click.option("--reasoning-parser", help="vLLM's reasoning parser for the model.")
@click.option(
    "--count",
    type=WholeRange(1, 1000),
    default=1,
    show_default=True,
    help="Workers in this process (simulated only); --id worker-5 starts worker-5, worker-6, ...",
)
@click.option("--kv-blocks", type=WholeRange(2, 2**31), help="KV cache size in blocks.")
@click.option("--block-size", type=WholeRange(1), help="Tokens per KV block.")
@click.option("--max-num-seqs", type=WholeRange(1), help="Maximum number of running requests.")
@click.option("--max-model-len", type=WholeRange(1), help="Maximum length of prompt and output, in tokens.")
@click.option(
    "--tensor-parallel-size",
    type=WholeRange(1),
    help="Devices that split each layer (vLLM only); must divide the model's heads.",
)
@click.option(
    "--pipeline-parallel-size",
    type=WholeRange(1),
    help="Stages of layers, each on its own devices (vLLM only).",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Start a step before the tokens of the previous one are available (vLLM only). Default: vLLM's "
    "choice.",
)
@click.option(
    "--predictor",
    metavar="PATH",
    help="Length predictor of the model (vLLM only); '' for none. Default: the tiny model's own.",
)
@click.option(
    "--engine-arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other engine argument; can be repeated.",
)
@click.option(
    "--nodes-timeout",
    type=RealRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the other machines of an engine (--engine-arg nnodes=N, vLLM only) may take to join.",
)
@click.option(
    "--intra",
    type=click.Choice([BY_POLICY, *intra_names()]),
    default=ENGINE_ORDER,
    show_default=True,
    help="Order in which the engine serves requests; `policy`: the order that belongs to the fleet's policy.",
)
@click.option(
    "--host-kv-bytes",
    type=WholeRange(0),
    help="Host memory for KV, in bytes: for preempted requests, and in the remaining space for prefixes "
    "evicted from the device; 0: both are recomputed.  [default: 4 GiB, or an eighth of the "
    "machine's memory if that is less; on a CPU engine, for preempted requests only]",
)
@click.option(
    "--stream-port",
    type=WholeRange(0, 65535),
    default=0,
    show_default=True,
    help="Port that front ends connect to; 0: any free port.",
)
@click.option(
    "--kv-address",
    metavar="HOST",
    help="Address whose network device KV transfer is bound to; default: that of --listen.",
)
@click.option(
    "--kv-ports",
    metavar="LOW-HIGH",
    help="TCP ports for KV transfer, one per network device; default: any free ports.",
)
@click.option(
    "--encrypt-kv",
    is_flag=True,
    help="Encrypt KV that leaves this host, and accept only encrypted KV from other hosts; for KV in host "
    "memory.",
)
@click.option(
    "--max-message-bytes",
    type=WholeRange(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    default=_DEFAULTS.max_message_bytes,
    show_default=True,
    help="Largest message accepted from front ends: a request with its prompt.",
)
@click.option(
    "--max-requests",
    type=WholeRange(min=1),
    default=_DEFAULTS.max_requests,
    show_default=True,
    help="Maximum requests on this worker, waiting or running; further ones are placed elsewhere, or "
    "refused.",
)
@click.option(
    "--report-interval",
    type=RealRange(min=0.01),
    default=0.5,
    show_default=True,
    help="Seconds between periodic reports.",
)
@click.option(
    "--step-limit",
    type=RealRange(min=1),
    default=_DEFAULTS.step_limit_s,
    show_default=True,
    help="Seconds without a finished step after which an engine with requests to run always counts as hung.",
)
@click.option(
    "--step-floor",
    type=RealRange(min=1),
    default=_DEFAULTS.step_floor_s,
    show_default=True,
    help="Minimum of the same limit when derived from recent steps (ten times the longest of its kind).",
)
@click.option(
    "--drain-timeout",
    type=RealRange(min=0),
    default=_DEFAULTS.drain_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="On SIGTERM, how long its requests may take to migrate; the rest is recomputed elsewhere.",
)
@click.option(
    "--pull-timeout",
    # No holder lends for longer.
    type=RealRange(min=0, min_open=True, max=LOAN_MAX_S),
    default=_DEFAULTS.pull_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="How long a pull of a prefix from another worker may take; after that the prompt is computed.",
)
@click.option(
    "--migration-bandwidth-share",
    type=RealRange(min=0, min_open=True, max=1),
    default=SHARE,
    show_default=True,
    help="Share of link time for incoming KV that no user waits for (rescheduling); 1: no limit.",
)
@click.option(
    "--profile",
    metavar="NAME|PATH",
    help="Step times of the model on this machine, instead of measured ones (tailrace profile).",
)
@click.option(
    "--profile-at-start",
    is_flag=True,
    help="Profile the engine before joining the fleet, unless its kind already has a profile; takes about "
    "a minute.",
)
def command(
    common: CommonOptions,
    kind: str,
    model: str | None,
    reasoning_parser: str | None,
    count: int,
    kv_blocks: int | None,
    block_size: int | None,
    max_num_seqs: int | None,
    max_model_len: int | None,
    tensor_parallel_size: int | None,
    pipeline_parallel_size: int | None,
    async_scheduling: bool | None,
    predictor: str | None,
    arguments: tuple[str, ...],
    nodes_timeout: float,
    intra: str,
    host_kv_bytes: int | None,
    stream_port: int,
    kv_address: str | None,
    kv_ports: str | None,
    encrypt_kv: bool,
    max_message_bytes: int,
    max_requests: int,
    report_interval: float,
    step_limit: float,
    step_floor: float,
    drain_timeout: float,
    pull_timeout: float,
    migration_bandwidth_share: float,
    profile: str | None,
    profile_at_start: bool,
) -> None:
    """Run an engine as a member of the fleet."""
    if kv_address is not None:
        common.check_exposed(f"{kv_address}:0")
    if count > 1 and kind != "simulated":
        raise click.UsageError(
            "--count is only for simulated engines: run each vLLM worker in its own process"
        )
    if kind == "simulated" and (tensor_parallel_size or pipeline_parallel_size):
        raise click.UsageError("--tensor-parallel-size and --pipeline-parallel-size are for vLLM engines")
    if count > 1 and stream_port:
        raise click.UsageError("--stream-port cannot be combined with --count")
    try:
        options = EngineOptions(
            kind=kind,
            model=model,
            reasoning_parser=reasoning_parser,
            kv_blocks=kv_blocks,
            block_tokens=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            host_kv_bytes=host_kv_bytes,
            async_scheduling=async_scheduling,
            predictor=predictor,
            arguments=dict(map(read_argument, arguments)),
            nodes_timeout_s=nodes_timeout,
        )
        if kind == "vllm":
            _check_span(options, common.insecure)
    except (EngineOptionError, EngineSettingError) as error:
        raise click.UsageError(str(error)) from error
    settings = WorkerSettings(
        stream_port=stream_port,
        kv_address=kv_address,
        kv_ports=_ports(kv_ports),
        encrypt_kv=encrypt_kv,
        max_message_bytes=max_message_bytes,
        max_requests=max_requests,
        report_s=report_interval,
        step_limit_s=step_limit,
        step_floor_s=step_floor,
        drain_timeout_s=drain_timeout,
        pull_timeout_s=pull_timeout,
        intra=intra,
        profile=_profile(profile),
        profile_at_start=profile_at_start,
        migration_bandwidth_share=migration_bandwidth_share,
    )
    run_service(lambda shutdown: _serve_or_log_error(common, options, count, settings, shutdown))


def _check_span(options: EngineOptions, insecure: bool) -> None:
    """Raise EngineSettingError if the settings of an engine on several machines do not fit together, and
    EngineOptionError if others could take part in it, or in a data-parallel deployment."""
    span = worker_span(
        {
            "tensor_parallel_size": options.tensor_parallel_size or 1,
            "pipeline_parallel_size": options.pipeline_parallel_size or 1,
            **options.arguments,
        }
    )
    meetings = [] if span is None else [span.meeting]
    if options.arguments.get("data_parallel_size", 1) != 1:
        # vLLM's default is a loopback address.
        address = str(options.arguments.get("data_parallel_address", "127.0.0.1"))
        port = options.arguments.get("data_parallel_rpc_port", 0)
        meetings.append(f"{f'[{address}]' if ':' in address else address}:{port}")
    for meeting in meetings:
        if not insecure and (reason := untrusted_reason(meeting)):
            raise EngineOptionError(reason)


def _ports(text: str | None) -> PortRange | None:
    try:
        return None if text is None else PortRange.parse(text)
    except BindingError as error:
        raise click.BadParameter(str(error), param_hint="--kv-ports") from error


def _profile(name: str | None) -> Profile | None:
    try:
        return None if name is None else load_profile(name)
    except ProfileError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error


async def _serve_or_log_error(
    common: CommonOptions, options: EngineOptions, count: int, settings: WorkerSettings, shutdown: Shutdown
) -> None:
    """Serve until told to stop or an engine dies; log what an operator can fix as one line.

    Never returns: the process exits as soon as everything is closed. The interpreter would need seconds
    more to unload an engine's modules, in which a supervisor cannot start the worker again.
    """
    status = 0
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
    registry = new_registry("worker", common.member_id)
    collector, histograms = WorkerCollector(registry), WorkerHistograms(registry)
    engines = [
        make_engine(
            options, histograms.step_late_seconds.observe, f"{','.join(common.etcd)}/{common.cluster}/{name}"
        )
        for name in names
    ]
    start_ucx(_ucx_options(common, settings))
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(discarding_strays(histograms.kv_strays.inc))
            store = await Store.connect(common.etcd, common.cluster, common.transport)
            stack.push_async_callback(store.close)
            membership = await Membership.start(store)
            stack.push_async_callback(membership.close)
            channels = Channels(common.transport)
            stack.push_async_callback(channels.close)
            tracing = await stack.enter_async_context(configure("worker", common.member_id))
            metrics_server = await stack.enter_async_context(
                serve_metrics(common.metrics, registry, common.transport)
            )
            memory = SharedMemory()
            stack.callback(memory.segments.close)
            membership.add_listener(memory.mappings.drop_gone)
            shared = SharedServices(
                store=store,
                membership=membership,
                channels=channels,
                tracing=tracing,
                metrics_address=common.advertised(metrics_server.address),
                host=common.advertised(common.listen).rpartition(":")[0],
                memory=memory,
            )
            died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            listen = common.listen
            workers: list[RunningWorker] = []
            for name, engine in zip(names, engines, strict=True):
                metrics = WorkerMetrics(histograms)
                running = await stack.enter_async_context(
                    running_worker(name, engine, listen, shared, metrics, settings, died)
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
    finally:
        stop_ucx()


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
