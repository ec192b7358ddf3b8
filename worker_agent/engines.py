"""Create the selected engine. Each kind is imported only when it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from tailrace.collector import collector_paused
from tailrace.numeric import RealRange, WholeRange
from tailrace.service.settings import empty_setting, setting
from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.faults import Faults
from worker_agent.kv.client import KvClient, SingleTransport
from worker_agent.kv.memory import SharedMemory, StagingPool, require_sealable
from worker_agent.kv.server import KvServer
from worker_agent.kv.ucx import ucx_started_with
from worker_agent.metrics import WorkerMetrics
from worker_agent.parallel.rank_transfers import RankedTransport

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


class EngineOptionError(ValueError):
    """An invalid engine setting; the message says which."""


def read_argument(text: str) -> tuple[str, Json]:
    """Parse NAME=VALUE; the value is JSON, or else a string. Raise EngineOptionError."""
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not name:
        raise EngineOptionError(f"engine argument {text!r}: NAME=VALUE expected")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_arguments(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Json]:
    try:
        return dict(map(read_argument, given))
    except EngineOptionError as error:
        raise click.UsageError(str(error)) from error


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings from the command line; None leaves a choice to the engine."""

    kind: str = setting("vllm", "Engine.", "--engine", type=click.Choice(["vllm", "simulated"]))
    model: str | None = setting(None, "Model; by default the tiny one that ships with Tailrace.")
    reasoning_parser: str | None = setting(None, "vLLM's reasoning parser for the model.")
    kv_blocks: int | None = setting(None, "KV cache size in blocks.", type=WholeRange(2, 2**31))
    block_tokens: int | None = setting(None, "Tokens per KV block.", "--block-size", type=WholeRange(1))
    max_num_seqs: int | None = setting(None, "Maximum number of running requests.", type=WholeRange(1))
    max_model_len: int | None = setting(
        None, "Maximum length of prompt and output, in tokens.", type=WholeRange(1)
    )
    tensor_parallel_size: int | None = setting(
        None,
        "Devices that split each layer (vLLM only); must divide the model's heads.",
        type=WholeRange(1),
    )
    pipeline_parallel_size: int | None = setting(
        None, "Stages of layers, each on its own devices (vLLM only).", type=WholeRange(1)
    )
    async_scheduling: bool | None = setting(
        None,
        "Start a step before the tokens of the previous one are available (vLLM only). Default: vLLM's "
        "choice.",
        "--async-scheduling/--no-async-scheduling",
    )
    # Of the tiny model by default its own, of others none. Empty: none.
    predictor: str | None = setting(
        None,
        "Length predictor of the model (vLLM only); '' for none. Default: the tiny model's own.",
        metavar="PATH",
    )
    # Fields of vLLM's EngineArgs or of SimulatedSettings.
    arguments: Mapping[str, Json] = empty_setting(
        dict,
        "Any other engine argument; can be repeated.",
        "--engine-arg",
        multiple=True,
        callback=_read_arguments,
        metavar="NAME=VALUE",
    )
    nodes_timeout_s: float = setting(
        600.0,
        "How long the other machines of an engine (--engine-arg nnodes=N, vLLM only) may take to join.",
        "--nodes-timeout",
        type=RealRange(min=1),
        metavar="SECONDS",
    )
    host_kv_bytes: int | None = setting(
        None,
        "Host memory for KV, in bytes: for preempted requests, and in the remaining space for prefixes "
        "evicted from the device; 0: both are recomputed.  [default: 4 GiB, or an eighth of the "
        "machine's memory if that is less; on a CPU engine, for preempted requests only]",
        type=WholeRange(0),
    )


def make_engine(
    options: EngineOptions, on_timer_late: Callable[[float], None] | None = None, owner: str = ""
) -> Engine:
    """Create an engine. Raise EngineOptionError.

    `owner`: identifies the engine's worker, and is the same after a restart.

    `on_timer_late` is called with the seconds by which each timer of a simulated engine is late; if given,
    call this in the event loop in which the engine will run.
    """
    if options.kind == "vllm":
        return _vllm(options, owner)
    if options.kind == "simulated":
        return _simulated(options, on_timer_late)
    raise EngineOptionError(f"no engine called {options.kind!r}")


def with_tiny_models_defaults(options: EngineOptions) -> EngineOptions:
    """Return the options with the tiny model's defaults, whatever path it is named by; other models' as they
    are."""
    from tailrace.tiny import MODEL_PATH, PREDICTOR_PATH, REASONING_PARSER

    if options.model is not None and Path(options.model).resolve() != MODEL_PATH:
        return options
    return replace(
        options,
        model=options.model or str(MODEL_PATH),
        reasoning_parser=options.reasoning_parser or REASONING_PARSER,
        predictor=str(PREDICTOR_PATH) if options.predictor is None else options.predictor,
        # vLLM's `auto` converts float32 weights to bfloat16, in which so small a model's answers are not
        # stable.
        arguments={"dtype": "float32", **options.arguments},
    )


def _vllm(engine_options: EngineOptions, owner: str) -> Engine:
    from worker_agent.engine.vllm.internals import VllmLacks, require_internals

    with collector_paused():
        try:
            require_internals()
        except VllmLacks as error:
            raise EngineOptionError(str(error)) from error
        from worker_agent.engine.vllm.engine import VllmEngine
        from worker_agent.engine.vllm.settings import VllmSettings

    options = with_tiny_models_defaults(engine_options)
    return VllmEngine(
        VllmSettings(
            model=options.model or "",
            reasoning_parser=options.reasoning_parser or "",
            predictor=options.predictor or "",
            kv_blocks=options.kv_blocks,
            block_tokens=options.block_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            host_kv_bytes=options.host_kv_bytes,
            async_scheduling=options.async_scheduling,
            tensor_parallel_size=options.tensor_parallel_size or 1,
            pipeline_parallel_size=options.pipeline_parallel_size or 1,
            nodes_timeout_s=options.nodes_timeout_s,
            engine_args=options.arguments,
            owner=owner,
        )
    )


def _simulated(options: EngineOptions, on_timer_late: Callable[[float], None] | None) -> Engine:
    import msgspec

    from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings
    from worker_agent.engine.simulated.clock import WatchedClock

    named: dict[str, Json] = {
        "model": options.model,
        "kv_blocks": options.kv_blocks,
        "block_tokens": options.block_tokens,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "host_kv_bytes": options.host_kv_bytes,
    }
    settings = {name: value for name, value in named.items() if value is not None} | dict(options.arguments)
    unknown = settings.keys() - set(SimulatedSettings.__struct_fields__)
    if unknown:
        raise EngineOptionError(f"the simulated engine has no setting {', '.join(sorted(unknown))}")
    clock = None if on_timer_late is None else WatchedClock(asyncio.get_running_loop(), on_timer_late)
    try:
        return SimulatedEngine(msgspec.convert(settings, SimulatedSettings), clock=clock)
    except (msgspec.ValidationError, RuntimeError) as error:
        raise EngineOptionError(f"simulated engine: {error}") from error


async def kv_transport(
    instance_id: str,
    engine: Engine,
    info: EngineInfo,
    memory: SharedMemory,
    faults: Faults,
    metrics: WorkerMetrics,
    sealed: bool,
) -> SingleTransport | RankedTransport:
    """Open the transport of a started engine. UCX must be started. `sealed`: KV leaves the host encrypted.

    Raise KvTransferError.
    """
    shape = info.kv_shape
    if info.ranked is not None:
        return await RankedTransport.begin(
            info.ranked,
            metrics,
            instance_id,
            shape.model_fingerprint,
            shape.block_tokens,
            ucx_started_with(),
            sealed,
        )
    if sealed:
        require_sealable(engine, shape.block_bytes)
    pool = StagingPool(engine, shape.block_bytes)
    server = KvServer(engine, shape, pool, memory.segments, faults, metrics, sealed)
    return SingleTransport(engine, server, KvClient(shape, pool, memory.mappings, metrics, sealed))
