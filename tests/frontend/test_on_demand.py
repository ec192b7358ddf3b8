"""A front end whose API server starts with the first connection."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from frontend_svc.settings import Front
from tests.frontend.front_end_thread import FrontEndThread
from tests.frontend.test_http import find_vllm_rs
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


def test_it_stops_while_it_is_asleep(front_end: FrontEndThread) -> None:
    front_end.start()
    front_end.stop()
    with pytest.raises(httpx.ConnectError):
        complete(front_end)
