"""A front end whose API server starts with the first connection."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from frontend_svc.settings import Front
from tests.frontend.front_end_thread import FrontEndThread
from tests.frontend.test_http import find_vllm_rs
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def api_servers() -> list[psutil.Process]:
    """Return the API servers that this process runs."""
    every = psutil.Process(os.getpid()).children(recursive=True)
    return [each for each in every if "vllm-rs" in " ".join(each.cmdline())]


def complete(front_end: FrontEndThread) -> int:
    return httpx.post(f"{front_end.url}/v1/completions", json=BODY, timeout=WAIT_S).status_code


@pytest.fixture
def front_end() -> FrontEndThread:
    if (vllm_rs := find_vllm_rs()) is None:
        pytest.skip("no vllm-rs")
    return FrontEndThread(Front.RUST, vllm_rs, on_demand=True)


def test_connections_that_come_first_are_answered(front_end: FrontEndThread) -> None:
    front_end.start()
    try:
        # Users can connect, and it has its worker; nothing else runs.
        assert front_end.serving and front_end.readiness.serving
        assert not api_servers() and not front_end.woken.is_set()
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda _: complete(front_end), range(8))] == [200] * 8
        assert front_end.woken.wait(WAIT_S)
        assert len(api_servers()) == 1
    finally:
        front_end.stop()
    assert not api_servers()


def test_it_stops_while_the_api_server_starts(tmp_path: Path) -> None:
    never = tmp_path / "vllm-rs"
    never.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    never.chmod(0o755)
    starting = FrontEndThread(Front.RUST, never, on_demand=True)
    starting.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, starting)
        wait_until(lambda: bool(api_servers()), "the API server to start")
        starting.call(starting.shutdown.run_drain())
        starting.stop()
        with pytest.raises(httpx.TransportError):
            waiting.result()
    assert not starting.woken.is_set() and not api_servers()


def test_it_stops_while_it_is_asleep(front_end: FrontEndThread) -> None:
    front_end.start()
    front_end.stop()
    with pytest.raises(httpx.ConnectError):
        complete(front_end)
