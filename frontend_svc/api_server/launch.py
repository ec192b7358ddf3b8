"""The command lines of vLLM's two API servers, and what their processes inherit.

vLLM passes its Rust server (`vllm-rs frontend`) the `vllm serve` arguments as JSON (vllm/v1/utils.py,
RustFrontendProcessManager). It accepts them by their long names with underscores, so flags can be translated
without vLLM's own parser.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from frontend_svc.api_server.sockets import EngineSockets, split_address
from frontend_svc.api_server.spec import (
    KEEP_ALIVE_S,
    READY_TIMEOUT_S,
    ApiServerSpec,
    BodyLimits,
    ConnectionLimits,
    Launch,
    offline_env,
)
from tailrace.json_value import JsonValue
from tailrace.service.vllm_line import Flags
from tailrace.tenancy.file import read_keys


class PythonBoot(msgspec.Struct, frozen=True, kw_only=True):
    """Inherited file descriptors and the addresses behind them; JSON on the command line."""

    http_fd: int
    # A URL, for the log.
    listen_address: str
    input_fd: int
    input_address: str
    output_fd: int
    output_address: str
    # File of the AdmissionFlag.
    admission_path: str
    # File of tenants and keys; empty: no key is required but vLLM's own.
    api_keys_path: str
    connections: ConnectionLimits
    limits: BodyLimits
    # See ApiServerSpec.
    sends_tenants: bool
    # Whether clients can come back for their answers.
    keeps_answers: bool
    # File of the adapters that were loaded at run time; empty: they are not shared.
    adapters_path: str


def python_launch(
    spec: ApiServerSpec, http: socket.socket, sockets: EngineSockets, admission_path: Path
) -> Launch:
    """Return the launch of vLLM's OpenAI app; see python_app.py."""
    host, port = split_address(spec.http_address)
    boot = PythonBoot(
        http_fd=http.fileno(),
        listen_address=f"http://{spec.http_address}",
        input_fd=sockets.input.fileno(),
        input_address=sockets.input_address,
        output_fd=sockets.output.fileno(),
        output_address=sockets.output_address,
        admission_path=str(admission_path),
        api_keys_path="" if spec.api_keys is None else str(spec.api_keys.absolute()),
        connections=spec.connections,
        limits=spec.limits,
        sends_tenants=spec.sends_tenants,
        keeps_answers=spec.keeps_answers,
        adapters_path="" if spec.adapters is None else str(spec.adapters),
    )
    command = [
        sys.executable,
        "-m",
        "frontend_svc.api_server.python_child",
        msgspec.json.encode(boot).decode(),
        spec.model,
        *("--host", host, "--port", str(port)),
    ]
    command += spec.line.arguments
    env = offline_env(spec)
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S", str(READY_TIMEOUT_S))
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_S))
    return Launch(tuple(command), env, (http.fileno(), sockets.input.fileno(), sockets.output.fileno()))


# Flags that take a list (nargs="+") in vLLM and concern an API server.
_LISTS: Final = frozenset({"served_model_name", "api_key", "lora_modules"})
_THREADS: Final = "TOKIO_WORKER_THREADS"


def rust_launch(spec: ApiServerSpec, http: socket.socket, sockets: EngineSockets, executable: Path) -> Launch:
    """Return the launch of the executable with inherited listeners. Raise KeyFileUnusable."""
    fds = (http.fileno(), sockets.input.fileno(), sockets.output.fileno())
    command = (
        str(executable),
        "frontend",
        *("--listen-fd", str(fds[0])),
        *("--input-listener-fd", str(fds[1])),
        *("--output-listener-fd", str(fds[2])),
        *("--engine-start-index", "0", "--engine-count", "1", "--data-parallel-size", "1"),
        *("--args-json", json.dumps(rust_arguments(spec), sort_keys=True)),
    )
    env = offline_env(spec)
    if spec.api_keys is not None:
        # Whoever has it says whose requests these are (tailrace/tenancy/keys.py); `ps` does not show it.
        env["VLLM_API_KEY"] = read_keys(spec.api_keys).edge_key
    # It takes as many threads as cores by default. One core is the front end's: with two of two, both spend
    # time on each other.
    env[_THREADS] = os.environ.get(_THREADS, str(max(1, len(os.sched_getaffinity(0)) - 1)))
    return Launch(command, env, fds)


def rust_arguments(spec: ApiServerSpec) -> dict[str, JsonValue]:
    """Return the JSON object for `--args-json`."""
    host, port = split_address(spec.http_address)
    arguments: dict[str, JsonValue] = {
        "model_tag": spec.model,
        "host": host,
        "port": port,
        "engine_ready_timeout_secs": int(os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S", READY_TIMEOUT_S)),
        "http_timeout_keep_alive": int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", KEEP_ALIVE_S)),
        # Without it, SIGTERM aborts every response.
        "shutdown_timeout": math.ceil(spec.drain_timeout_s),
    }
    return arguments | flags_to_json(spec.line.without("config").flags)


def flags_to_json(flags: Flags) -> dict[str, JsonValue]:
    """Convert the values of flags: `--max-model-len 4096 --no-x` to {"max_model_len": 4096, "x": false}."""
    arguments: dict[str, JsonValue] = {}
    for name, values in flags.items():
        if not values:
            arguments.update({name.removeprefix("no_"): False} if name.startswith("no_") else {name: True})
        elif len(values) > 1 or name in _LISTS:
            arguments[name] = [_value(value) for value in values]
        else:
            arguments[name] = _value(values[0])
    return arguments


def _value(text: str) -> JsonValue:
    """Parse numbers, booleans and JSON objects; return everything else as a string."""
    if text in ("true", "false", "null") or text[:1] in "{[-0123456789":
        try:
            value: JsonValue = json.loads(text)
        except json.JSONDecodeError:
            return text
        return value
    return text
