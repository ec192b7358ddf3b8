"""Profiling of the vLLM engine on the tiny model: the whole plan is executed and yields a profile."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from tests.waiting import WAIT_S
from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.profiling.fitting import profile_of
from worker_agent.profiling.measure import batches, measure, prompt_lengths
from worker_agent.profiling.probes import Probes
from worker_agent.settings import EngineOptions

pytestmark = pytest.mark.vllm


class NoUsers:
    """Engine sink that must not be used."""

    def on_step(self, columns: StepColumns) -> None:
        raise AssertionError("an output of nobody's")

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("nothing was called")

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


async def test_profile_of_a_vllm_engine() -> None:
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=128,
            arguments={"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8},
        )
    )
    probes = Probes(NoUsers(), asyncio.get_running_loop().time)
    info = await engine.start(probes)
    try:
        # The whole plan takes some seconds, or as long as a busy machine takes.
        samples = await measure(engine, info, probes, WAIT_S, lambda _: None)
    finally:
        await engine.stop()
    assert [tokens for tokens, _ in samples.ttft] == prompt_lengths(info)
    assert {batch.requests for batch in batches(info)} <= {sample.requests for sample in samples.decode}
    times = [seconds for _, seconds in samples.ttft] + [sample.seconds for sample in samples.decode]
    assert min(times) > 0.0
    # A minute between tokens, longer than any stall of the machine.
    found = profile_of(info, "w", samples, 60.0, 5.0)
    assert "threads" in found.hardware and found.kind.startswith("vllm-")
    assert found.ttft.samples == len(samples.ttft) and found.decode_samples == len(samples.decode)
    assert found.max_running_tokens > 0
