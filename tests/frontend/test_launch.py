"""What an API server is started with."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from frontend_svc.api_server.launch import python_launch, rust_arguments, rust_launch
from frontend_svc.api_server.sockets import EngineSockets
from frontend_svc.api_server.spec import ApiServerSpec

# nginx and AWS's application load balancer reuse a connection for so long by default.
PROXY_REUSES_S = 60
VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"


def keep_alive_s(folder: Path) -> tuple[int, int]:
    """Return for how long an idle connection is kept, by the Python and the Rust API server."""
    spec = ApiServerSpec("127.0.0.1:8000", "tiny")
    with socket.socket() as http, EngineSockets.bind(folder) as sockets:
        launch = python_launch(spec, http, sockets, folder / "admission")
    rust_s = rust_arguments(spec)["http_timeout_keep_alive"]
    assert isinstance(rust_s, int)
    return int(launch.env[VARIABLE]), rust_s


def test_idle_connections_outlive_the_reuse_of_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    python_s, rust_s = keep_alive_s(tmp_path)
    assert python_s == rust_s > PROXY_REUSES_S


def test_the_operators_own_keep_alive_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    assert keep_alive_s(tmp_path) == (7, 7)


@pytest.mark.parametrize(
    ("cores", "own", "threads"), [(1, None, "1"), (2, None, "1"), (16, None, "15"), (16, "4", "4")]
)
def test_vllm_rs_leaves_a_core_to_the_front_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, own: str | None, threads: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("TOKIO_WORKER_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("TOKIO_WORKER_THREADS", own)
    spec = ApiServerSpec("127.0.0.1:8000", "tiny")
    with socket.socket() as http, EngineSockets.bind(tmp_path) as sockets:
        launch = rust_launch(spec, http, sockets, Path("vllm-rs"))
    assert launch.env["TOKIO_WORKER_THREADS"] == threads
