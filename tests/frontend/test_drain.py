"""Drain of a front end with vLLM's real API servers: streams finish, and no new requests are accepted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from experiments.tiny.tokens import END_THINK, IM_END, THINK
from frontend_svc.admission import NOT_SERVING
from frontend_svc.settings import Front
from tailrace.v1 import worker_pb2
from tests.frontend.echo_worker import ANSWER, THOUGHT, EchoWorker
from tests.frontend.front_end_thread import FrontEndThread
from tests.frontend.scripted_worker import FINISHED, PREFILL_DONE, REASONING_ENDED, outputs
from tests.frontend.test_http import find_vllm_rs
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

BODY = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 100}


class HeldWorker(EchoWorker):
    """Worker that begins each answer at once and ends it on `finish`."""

    async def on_submit(self, submit: worker_pb2.Submit) -> None:
        self.submits.append(submit)
        self.send(outputs(submit, [THINK, *THOUGHT.encode()], 0, PREFILL_DONE))

    async def finish(self) -> None:
        """Complete every answer."""
        for submit in self.submits:
            rest = [END_THINK, *ANSWER.encode(), IM_END]
            self.send(outputs(submit, rest, len(THOUGHT) + 1, REASONING_ENDED | FINISHED))


@pytest.fixture(
    params=[pytest.param(Front.PYTHON, marks=pytest.mark.slow), Front.RUST], ids=lambda front: front.value
)
def front_end(request: pytest.FixtureRequest) -> Iterator[FrontEndThread]:
    """A front end for one test, which stops it."""
    vllm_rs = find_vllm_rs()
    if request.param is Front.RUST and vllm_rs is None:
        pytest.skip("no vllm-rs")
    thread = FrontEndThread(request.param, vllm_rs or Path(), HeldWorker("w0"))
    thread.start()
    yield thread
    thread.stop()


def test_drain_finishes_streams_and_accepts_no_new_requests(front_end: FrontEndThread) -> None:
    worker = front_end.worker
    assert isinstance(worker, HeldWorker)
    with httpx.stream("POST", f"{front_end.url}/v1/completions", json=BODY, timeout=WAIT_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        drained = threading.Event()

        async def drain() -> None:
            await front_end.shutdown.run_drain()
            drained.set()

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(drain())

        front_end.call(begin())
        while _accepts(front_end.url):
            pass
        assert not front_end.serving
        assert front_end.readiness.unready == NOT_SERVING
        assert not drained.is_set()
        front_end.call(worker.finish())
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" or rest[-2] == "data: [DONE]"
    assert ANSWER[-1] in "".join(rest)
    assert drained.wait(WAIT_S)


def _accepts(url: str) -> bool:
    """Return whether the port accepts connections."""
    try:
        httpx.get(f"{url}/health", timeout=WAIT_S)
    except httpx.ConnectError:
        return False
    return True
