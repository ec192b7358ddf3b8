"""Settings of a worker and of its engine, from the command line and a `vllm serve` line.

Importing this imports no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import click

from tailrace.collector import collector_paused
from tailrace.handover import ADOPT_S
from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import intra_names
from tailrace.json_value import JsonValue
from tailrace.numeric import Duration, RealRange, WholeRange
from tailrace.profiles import Profile, ProfileError, load_profile
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from tailrace.service.settings import Parsed, empty_setting, setting
from tailrace.service.vllm_line import VllmLine
from worker_agent.intra_switch import BY_POLICY
from worker_agent.migration.copying import SHARE
from worker_agent.network import BindingError, PortRange
from worker_agent.prefixes import LOAN_MAX_S


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
    """Settings of the engine; None leaves a choice to it."""

    kind: str = setting("vllm", "Engine.", "--engine", type=click.Choice(["vllm", "simulated"]))
    model: str = setting("", "Model; by default the tiny one that ships with Tailrace.")
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
    unused: Sequence[str] = ()
    simulated: Mapping[str, JsonValue] = empty_setting(
        dict,
        "A setting of the simulated engine, such as speed=2; a wrong NAME lists them all. Can be repeated.",
        "--sim",
        multiple=True,
        callback=_read_settings,
        metavar="NAME=VALUE",
    )
    nodes_timeout_s: float = setting(
        600.0,
        "How long the other machines of an engine (--nnodes, vLLM only) may take to join.",
        "--nodes-timeout",
        rare=True,
        type=Duration(min=1),
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
    return replace(options, model=options.model or line.model, arguments=arguments, unused=unused)


_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _tokens(flag: str, line: VllmLine) -> int:
    """Return a flag's number, which may have a unit as vLLM's do (32k, 32K). Raise EngineOptionError."""
    text = line.last(flag)
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        return int(float(number) * unit)
    except (OverflowError, ValueError):
        raise EngineOptionError(f"--{flag.replace('_', '-')}: {text!r} is not a number") from None


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings besides those of the engine. Times in seconds, sizes in bytes."""

    intra: str = setting(
        ENGINE_ORDER,
        "Order in which the engine serves requests; `policy`: the order that belongs to the fleet's policy.",
        type=click.Choice([BY_POLICY, *intra_names()]),
    )
    stream_port: int = setting(
        0, "Port that front ends connect to; 0: any free port.", type=WholeRange(0, 65535)
    )
    kv_address: str | None = setting(
        None,
        "Address whose network device KV transfer is bound to; default: that of --listen.",
        metavar="HOST",
    )
    kv_ports: PortRange | None = setting(
        None,
        "TCP ports for KV transfer, one per network device; default: any free ports.",
        type=Parsed(PortRange.parse, BindingError),
        metavar="LOW-HIGH",
        rare=True,
    )
    encrypt_kv: bool = setting(
        False,
        "Encrypt KV that leaves this host, and accept only encrypted KV from other hosts; for KV in host "
        "memory.",
        is_flag=True,
    )
    max_message_bytes: int = setting(
        DEFAULT_MAX_MESSAGE_BYTES,
        "Largest message accepted from front ends: a request with its prompt.",
        type=WholeRange(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        rare=True,
    )
    max_requests: int = setting(
        8192,
        "Maximum requests on this worker, waiting or running.",
        type=WholeRange(min=1),
        rare=True,
    )
    report_s: float = setting(
        0.5, "Seconds between periodic reports.", "--report-interval", rare=True, type=Duration(min=0.01)
    )
    # When an engine that has requests to run but finishes no step counts as hung: progress.py.
    step_limit_s: float = setting(
        300.0,
        "Seconds without a finished step after which an engine with requests to run always counts as hung.",
        "--step-limit",
        rare=True,
        type=Duration(min=1),
    )
    step_floor_s: float = setting(
        30.0,
        "Minimum of the same limit when derived from recent steps (ten times the longest of its kind).",
        "--step-floor",
        rare=True,
        type=Duration(min=1),
    )
    drain_timeout_s: float = setting(
        60.0,
        "On SIGTERM, how long its requests may take to migrate; the rest is recomputed elsewhere.",
        "--drain-timeout",
        type=Duration(min=0),
        metavar="SECONDS",
    )
    pull_timeout_s: float = setting(
        5.0,
        "How long a pull of a prefix from another worker may take; after that the prompt is computed.",
        "--pull-timeout",
        rare=True,
        # No holder lends for longer.
        type=Duration(min=0, min_open=True, max=LOAN_MAX_S),
        metavar="SECONDS",
    )
    migration_bandwidth_share: float = setting(
        SHARE,
        "Share of link time for incoming KV that no user waits for (rescheduling); 1: no limit.",
        type=RealRange(min=0, min_open=True, max=1),
        rare=True,
    )
    profile: Profile | None = setting(
        None,
        "Step times of the model on this machine, instead of measured ones (tailrace profile).",
        type=Parsed(load_profile, ProfileError),
        metavar="NAME|PATH",
    )
    profile_at_start: bool = setting(
        False,
        "Profile the engine before joining the fleet, unless its kind already has a profile; takes about "
        "a minute.",
        is_flag=True,
    )
    # Timeout of an import whose request does not set one.
    import_timeout_s: float = 10.0
    # A source that is paused longer asks the front end whether to resume.
    pause_limit_s: float = 10.0
    # Timeout of the front end's reply to an adoption, for which it may itself wait 2 s.
    adopt_timeout_s: float = ADOPT_S
