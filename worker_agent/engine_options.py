"""Settings of an engine, from the command line and a `vllm serve` line. Importing this imports no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import click

from tailrace.collector import collector_paused
from tailrace.json_value import JsonValue
from tailrace.numeric import Duration, WholeRange
from tailrace.service.settings import empty_setting, setting
from tailrace.service.vllm_line import VllmLine


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
