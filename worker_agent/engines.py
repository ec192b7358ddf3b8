"""Create the selected engine. Each kind is imported only when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tailrace.collector import collector_paused
from tailrace.json_value import JsonValue
from tailrace.profiles import Profile
from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.faults import Faults
from worker_agent.kv.client import KvClient, SingleTransport
from worker_agent.kv.memory import SharedMemory, StagingPool, require_sealable
from worker_agent.kv.server import KvServer
from worker_agent.kv.ucx import ucx_started_with
from worker_agent.metrics import WorkerMetrics
from worker_agent.parallel.rank_transfers import RankedTransport
from worker_agent.settings import EngineOptionError, EngineOptions


def make_engine(
    options: EngineOptions,
    on_timer_late: Callable[[float], None] | None = None,
    profile: Profile | None = None,
) -> Engine:
    """Create an engine. Raise EngineOptionError.

    `profile`: what policies are told of its speed; a simulated engine steps as it says, unless its own
    settings say otherwise.

    `on_timer_late` is called with the seconds by which each timer of a simulated engine is late; if given,
    call this in the event loop in which the engine will run.
    """
    if options.kind == "vllm":
        return _vllm(options)
    if options.kind == "simulated":
        return _simulated(options, on_timer_late, profile)
    raise EngineOptionError(f"no engine called {options.kind!r}")


def with_tiny_models_defaults(options: EngineOptions) -> EngineOptions:
    """Return the options with the tiny model's defaults, whatever path it is named by; other models' as they
    are."""
    from tailrace.tiny import MODEL_PATH, PREDICTOR_PATH, REASONING_PARSER

    if options.model and Path(options.model).resolve() != MODEL_PATH:
        return options
    return replace(
        options,
        model=options.model or str(MODEL_PATH),
        predictor=str(PREDICTOR_PATH) if options.predictor is None else options.predictor,
        # vLLM's `auto` converts float32 weights to bfloat16, in which so small a model's answers are not
        # stable.
        arguments={"reasoning_parser": REASONING_PARSER, "dtype": "float32", **options.arguments},
    )


def _vllm(options: EngineOptions) -> Engine:
    from worker_agent.engine.vllm.internals import VllmLacks, require_internals

    with collector_paused():
        try:
            require_internals()
        except VllmLacks as error:
            raise EngineOptionError(str(error)) from error
        from worker_agent.engine.vllm.engine import VllmEngine

    return VllmEngine(with_tiny_models_defaults(options))


def _simulated(
    options: EngineOptions, on_timer_late: Callable[[float], None] | None, profile: Profile | None
) -> Engine:
    import msgspec

    from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings
    from worker_agent.engine.simulated.clock import WatchedClock

    named: dict[str, JsonValue] = {
        "model": options.model or None,
        "kv_blocks": options.kv_blocks,
        "host_kv_bytes": options.host_kv_bytes,
    }
    if profile is not None:
        named["profile"] = msgspec.to_builtins(profile)
    given = {name: value for name, value in named.items() if value is not None}
    settings = {**given, **options.arguments, **options.simulated}
    unknown = settings.keys() - set(SimulatedSettings.__struct_fields__)
    if unknown:
        raise EngineOptionError(
            f"the simulated engine has no setting {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(SimulatedSettings.__struct_fields__))}"
        )
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
