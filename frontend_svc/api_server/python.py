"""The command line of vLLM's Python API server and what the process inherits."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

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
