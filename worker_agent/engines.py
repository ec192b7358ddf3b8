"""Create the selected engine. Each kind is imported only when it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import click

from tailrace.collector import collector_paused
from tailrace.json_value import JsonValue
from tailrace.numeric import RealRange, WholeRange
from tailrace.profiles import Profile
from tailrace.service.settings import empty_setting, setting
from tailrace.service.vllm_line import VllmLine
from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.faults import Faults
from worker_agent.kv.client import KvClient, SingleTransport
from worker_agent.kv.memory import SharedMemory, StagingPool, require_sealable
from worker_agent.kv.server import KvServer
from worker_agent.kv.ucx import ucx_started_with
from worker_agent.metrics import WorkerMetrics
from worker_agent.parallel.rank_transfers import RankedTransport


class EngineOptionError(ValueError):
    """An invalid engine setting; the message says which."""


def _read_settings(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, JsonValue]:
    """Parse NAME=VALUE words, whose values are JSON or else strings. Raise click.BadParameter."""
    settings: dict[str, JsonValue] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r}: NAME=VALUE expected")
        try:
            settings[name.strip().replace("-", "_")] = json.loads(value)
        except ValueError:
            settings[name.strip().replace("-", "_")] = value
    return settings


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings from the command line; None leaves a choice to the engine."""

    kind: str = setting("vllm", "Engine.", "--engine", type=click.Choice(["vllm", "simulated"]))
    model: str | None = setting(None, "Model; by default the tiny one that ships with Tailrace.")
    kv_blocks: int | None = setting(None, "KV cache size in blocks.", type=WholeRange(2, 2**31))
    # Of the tiny model by default its own, of others none. Empty: none.
    predictor: str | None = setting(
        None,
        "Length predictor of the model (vLLM only); '' for none. Default: the tiny model's own.",
        metavar="PATH",
    )
    # Fields of vLLM's EngineArgs that its flags give, or of SimulatedSettings.
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    # Flags of `vllm serve` that say nothing to this engine, such as the API server's.
    unused: tuple[str, ...] = ()
    simulated: Mapping[str, JsonValue] = empty_setting(
        dict,
        "A setting of the simulated engine, such as speed=2 (docs/start-stop.md); can be repeated.",
        "--sim",
        multiple=True,
        callback=_read_settings,
        metavar="NAME=VALUE",
    )
    nodes_timeout_s: float = setting(
        600.0,
        "How long the other machines of an engine (--nnodes, vLLM only) may take to join.",
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


# Flags of vLLM's engine that mean something to a simulated one, and what it calls them.
_SIMULATED: Final = {
    "block_size": "block_tokens",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
}
_CACHING: Final = {"enable_prefix_caching": True, "no_enable_prefix_caching": False}


def with_flags(options: EngineOptions, line: VllmLine) -> EngineOptions:
    """Return the options with what the line's flags say to this kind of engine. Raise EngineOptionError.

    Imports vLLM for a vLLM engine.
    """
    if options.kind == "vllm":
        with collector_paused():
            try:
                from tailrace.wire.serve_flags import FlagRefused, read_engine_flags
            except ImportError as error:
                raise EngineOptionError(
                    f"{error}; scripts/install.sh installs vLLM (--engine simulated needs none)"
                ) from error
        try:
            flags = read_engine_flags(line.arguments)
        except FlagRefused as error:
            raise EngineOptionError(str(error)) from error
        arguments, others = flags.arguments, flags.api_server
    else:
        cached = {value for flag, value in _CACHING.items() if flag in line.flags}
        arguments = {"prefix_caching": any(cached)} if cached else {}
        arguments |= {_SIMULATED[flag]: _tokens(flag, line) for flag in line.flags.keys() & _SIMULATED.keys()}
        others = sorted(line.flags.keys() - _SIMULATED.keys() - _CACHING.keys())
    unused = tuple(f"--{name.replace('_', '-')}" for name in others)
    return replace(options, model=options.model or line.model or None, arguments=arguments, unused=unused)


_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _tokens(flag: str, line: VllmLine) -> int:
    """Return a flag's number, which may have a unit as vLLM's do (32k, 32K). Raise EngineOptionError."""
    text = line.last(flag)
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        return int(float(number) * unit)
    except (OverflowError, ValueError):
        raise EngineOptionError(f"--{flag.replace('_', '-')}: {text!r} is not a number") from None


def make_engine(
    options: EngineOptions,
    on_timer_late: Callable[[float], None] | None = None,
    owner: str = "",
    profile: Profile | None = None,
) -> Engine:
    """Create an engine. Raise EngineOptionError.

    `owner`: identifies the engine's worker, and is the same after a restart. `profile`: what policies are
    told of its speed; a simulated engine steps as it says, unless its own settings say otherwise.

    `on_timer_late` is called with the seconds by which each timer of a simulated engine is late; if given,
    call this in the event loop in which the engine will run.
    """
    if options.kind == "vllm":
        return _vllm(options, owner)
    if options.kind == "simulated":
        return _simulated(options, on_timer_late, profile)
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
        predictor=str(PREDICTOR_PATH) if options.predictor is None else options.predictor,
        # vLLM's `auto` converts float32 weights to bfloat16, in which so small a model's answers are not
        # stable.
        arguments={"reasoning_parser": REASONING_PARSER, "dtype": "float32", **options.arguments},
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
            predictor=options.predictor or "",
            kv_blocks=options.kv_blocks,
            host_kv_bytes=options.host_kv_bytes,
            nodes_timeout_s=options.nodes_timeout_s,
            engine_args=options.arguments,
            owner=owner,
        )
    )


def _simulated(
    options: EngineOptions, on_timer_late: Callable[[float], None] | None, profile: Profile | None
) -> Engine:
    import msgspec

    from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings
    from worker_agent.engine.simulated.clock import WatchedClock

    named: dict[str, JsonValue] = {
        "model": options.model,
        "kv_blocks": options.kv_blocks,
        "host_kv_bytes": options.host_kv_bytes,
    }
    if profile is not None:
        named["profile"] = msgspec.to_builtins(profile)
    given = {name: value for name, value in named.items() if value is not None}
    settings = {**given, **options.arguments, **options.simulated}
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
