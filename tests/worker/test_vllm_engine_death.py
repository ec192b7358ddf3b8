"""Death of a vLLM engine: reported to the worker and to all pending calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tailrace.tiny import MODEL_PATH
from tests.harness.forked import api_server_python
from tests.waiting import WAIT_S

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.parallel.rank_leftovers import remove_left_behind
from worker_agent.settings import EngineOptions

pytestmark = pytest.mark.vllm


class Sink:
    """Waits for the engine's death."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.reason = ""

    def on_step(self, columns: StepColumns) -> None:
        raise AssertionError("nothing was submitted")

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("nothing was called")

    def on_engine_dead(self, reason: str) -> None:
        self.reason = reason
        self.died.set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EngineOptions(model="/nowhere/at-all"), "--model: no folder /nowhere/at-all"),
        # Detected only after the model is loaded.
        (EngineOptions(model=str(MODEL_PATH), kv_blocks=4), "max_model_len"),
    ],
    ids=["no model", "no room"],
)
async def test_invalid_setting_is_named_in_one_line(
    settings: EngineOptions, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = VllmEngine(settings)
    with pytest.raises(RuntimeError, match="did not start") as raised:
        await engine.start(Sink())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not [record for record in caplog.records if record.exc_info and record.levelname != "DEBUG"]


async def test_failure_of_the_engine_thread_is_reported_to_all() -> None:
    engine, sink = (
        VllmEngine(EngineOptions(model=str(MODEL_PATH), kv_blocks=32, arguments={"max_model_len": 512})),
        Sink(),
    )
    await engine.start(sink)

    def fail() -> None:
        raise ArithmeticError("a step went wrong")

    engine._thread.post(fail)
    with pytest.raises(EngineRefusal, match="the engine has failed"):
        await engine.export_open("someone")
    async with asyncio.timeout(WAIT_S):
        await sink.died.wait()
    assert sink.reason == "ArithmeticError: a step went wrong"
    with pytest.raises(EngineRefusal, match="the engine has failed"):
        await engine.export_resume("someone")
    await engine.stop()
    # A worker's process ends with its engine; this one runs further tests, and vLLM keeps state per process.
    engine._parts.core.core.shutdown()


async def test_engine_that_hangs_is_given_up_at_once() -> None:
    engine, sink = VllmEngine(EngineOptions(model=str(MODEL_PATH))), Sink()
    engine._sink = sink
    hung = threading.Event()
    # As a step that never ends; no model is needed for that.
    engine._thread._thread = threading.Thread(target=hung.wait, daemon=True)
    engine._thread._thread.start()
    try:
        asked = asyncio.create_task(engine.export_resume("someone"))
        await asyncio.sleep(0)
        engine.fail("the engine hangs")
        with pytest.raises(EngineRefusal, match="the engine has failed: the engine hangs"):
            await asked
        assert sink.reason == "the engine hangs"
        # Raises TimeoutError if it expects the thread to end.
        await engine.stop()
    finally:
        hung.set()


_KILLED = """
import asyncio, os, signal, sys, tempfile
from unittest.mock import Mock
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.settings import EngineOptions

# It may have been read before the fork.
tempfile.tempdir = os.environ["TMPDIR"]

async def run():
    engine = VllmEngine(EngineOptions(model=sys.argv[1], kv_blocks=32, arguments={"max_model_len": 512}))
    await engine.start(Mock())
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await engine.stop()
    os._exit(0)

asyncio.run(run())
"""


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_an_engine_leaves_no_rendezvous(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [api_server_python() or sys.executable, "-c", _KILLED, str(MODEL_PATH), end]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, timeout=WAIT_S, check=False)
    meetings = list(tmp_path.glob("vllm_dist_*"))
    assert len(meetings) == (end == "killed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # As the next engine.
    remove_left_behind()
    assert not list(tmp_path.glob("vllm_dist_*"))
