"""The command line of vLLM's Rust API server (`vllm-rs frontend`).

vLLM passes it the `vllm serve` arguments as JSON (vllm/v1/utils.py, RustFrontendProcessManager). It accepts
them by their long names with underscores, so flags can be translated without vLLM's own parser.
"""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Final

from frontend_svc.api_server.sockets import EngineSockets, split_address
from frontend_svc.api_server.spec import KEEP_ALIVE_S, READY_TIMEOUT_S, ApiServerSpec, Launch, offline_env
from tailrace.json_value import JsonValue
from tailrace.service.vllm_line import Flags
from tailrace.tenancy.file import read_keys

# Flags that take a list (nargs="+") in vLLM and concern an API server.
_LISTS: Final = frozenset({"served_model_name", "api_key", "lora_modules"})


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
