"""Measuring the vLLM engine on the tiny model, in a few seconds."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.settings import VllmSettings
from worker_agent.profiling.fitting import profile_of
from worker_agent.profiling.measure import measure
from worker_agent.profiling.probes import Probes

pytestmark = pytest.mark.vllm


class NoUsers:
    """Must hear of nothing."""

    def on_step(self, columns: StepColumns) -> None:
        raise AssertionError("an output of nobody's")

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("nothing was called")

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


async def test_a_vllm_engine_is_measured() -> None:
    engine = VllmEngine(
        VllmSettings(
            model=str(MODEL_PATH),
            dtype="float32",
            max_model_len=512,
            kv_blocks=128,
            max_num_seqs=16,
            cpu_threads=1,
        )
    )
    probes = Probes(NoUsers(), asyncio.get_running_loop().time)
    info = await engine.start(probes)
    try:
        samples = await measure(engine, info, probes, 5.0, lambda _: None)
        # Those that the end of the time cut off are dropped by the engine's thread.
        async with asyncio.timeout(30):
            while engine.stats().requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await engine.stop()
    found = profile_of(info, "w", samples, 0.1, 5.0)
    assert "threads" in found.hardware and found.kind.startswith("vllm-")
    # What any machine's figures have in common: times are there, and longer prompts do not take less.
    assert found.profile.decode.base_ms > 0.0 and found.decode_samples >= 3
    assert found.ttft.samples >= 3 and found.max_running_tokens > 0
    curve = dict(samples.ttft)
    assert curve[max(curve)] > curve[min(curve)]
