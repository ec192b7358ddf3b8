"""Profiling of the simulated engine in virtual time: the fits recover its profile."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np
import pytest

from tailrace.profiles import Profile
from tailrace.records import ProfileRecord
from tests.worker.simulated import request_frames
from tests.worker.virtual_loop import run_virtually
from worker_agent.engine.base import EngineInfo, Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.simulated import SimulatedEngine, SimulatedFaults, SimulatedSettings
from worker_agent.engine.simulated.engine import SimulatedEngine as Engine
from worker_agent.profiling.fitting import TooFewSamples, _qoe, kind_of, profile_of
from worker_agent.profiling.measure import Samples, batches, measure, prompt_lengths
from worker_agent.profiling.probes import ProbeFailed, ProbeResult, Probes, own_stats

SETTINGS = SimulatedSettings(kv_blocks=4096, max_model_len=2048, max_num_seqs=64, block_tokens=16)


class Users:
    """The front ends' side, which must not see outputs of probes."""

    def __init__(self) -> None:
        self.steps: list[StepColumns] = []

    def on_step(self, columns: StepColumns) -> None:
        self.steps.append(columns)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("no utility calls in these tests")

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


class Bench:
    """An engine with the profiler's probes between it and its users."""

    def __init__(self, settings: SimulatedSettings = SETTINGS, faults: SimulatedFaults | None = None) -> None:
        self.engine: Engine = SimulatedEngine(settings, faults=faults)
        self.users = Users()
        self.messages: list[str] = []

    async def start(self) -> EngineInfo:
        self.probes = Probes(self.users, asyncio.get_running_loop().time)
        self.info = await self.engine.start(self.probes)
        return self.info

    async def measure(self, budget_s: float = 60.0) -> Samples:
        return await measure(self.engine, self.info, self.probes, budget_s, self.messages.append)

    def submit(self, output_tokens: int) -> None:
        """Submit a user's request."""
        sampling = {"max_tokens": output_tokens, "ignore_eos": True}
        frames = request_frames("user", [65, 66], **sampling)
        self.engine.submit(Submission(RequestKey(0, 1), "user", 0, frames, frontend_id="fe"))


def measured(settings: SimulatedSettings, budget_s: float = 60.0) -> tuple[ProfileRecord, Profile, Bench]:
    """Profile an engine; return the measured record and the engine's own profile."""

    async def run() -> tuple[ProfileRecord, Profile, Bench]:
        bench = Bench(settings)
        info = await bench.start()
        samples = await bench.measure(budget_s)
        await bench.engine.stop()
        assert info.profile is not None
        return profile_of(info, "w", samples, 0.1, 1.0), info.profile, bench

    return run_virtually(run())


def test_fits_recover_the_profile_of_the_engine() -> None:
    found, actual, bench = measured(SETTINGS)
    for name in ("base_ms", "ms_per_token", "ms_per_token_squared"):
        assert getattr(found.profile.prefill, name) == pytest.approx(getattr(actual.prefill, name), rel=0.01)
    for name in ("base_ms", "ms_per_request", "ms_per_kv_token"):
        assert getattr(found.profile.decode, name) == pytest.approx(getattr(actual.decode, name), rel=0.01)
    assert found.ttft.r_squared > 0.999 and found.prefill_error < 0.01 and found.decode_error < 0.01
    # 0.1 s per step: more tokens than this engine's KV has room for.
    assert found.max_running_tokens == 4096 * 16
    assert found.qoe is not None and found.qoe.error < 0.2 and min(found.qoe.d) >= 0.0
    assert bench.users.steps == [], "users received outputs of a probe"


def test_engine_with_another_speed_gets_its_own_profile() -> None:
    slow = msgspec.structs.replace(SETTINGS, speed=0.25)
    found, actual, _ = measured(slow, budget_s=300.0)
    fast, _, _ = measured(SETTINGS)
    assert found.kind != fast.kind
    assert found.profile.decode.base_ms == pytest.approx(actual.decode.base_ms, rel=0.01)
    assert found.profile.decode.base_ms == pytest.approx(4 * fast.profile.decode.base_ms, rel=0.01)


def test_prompts_of_several_steps_are_fitted_with_their_number() -> None:
    found, actual, _ = measured(msgspec.structs.replace(SETTINGS, max_num_batched_tokens=256))
    assert found.profile.prefill.base_ms == pytest.approx(actual.prefill.base_ms, rel=0.02)
    assert found.profile.prefill.ms_per_token == pytest.approx(actual.prefill.ms_per_token, rel=0.02)


def test_stalls_increase_the_average_step_time() -> None:
    async def run() -> tuple[ProfileRecord, ProfileRecord]:
        bench = Bench()
        info = await bench.start()
        samples = await bench.measure()
        await bench.engine.stop()
        smooth = profile_of(info, "w", samples, 0.1, 1.0)
        # In every fifth sample the average step took twice the median.
        samples.decode_stalls = [2.0 if n % 5 == 0 else 1.0 for n in range(5)]
        samples.ttft_stalls = [1.5, 1.5]
        return smooth, profile_of(info, "w", samples, 0.1, 1.0)

    smooth, stalled = run_virtually(run())
    for name in ("base_ms", "ms_per_request", "ms_per_kv_token"):
        without, found = getattr(smooth.profile.decode, name), getattr(stalled.profile.decode, name)
        assert found == pytest.approx(1.2 * without, rel=0.01)
    assert stalled.profile.prefill.base_ms == pytest.approx(1.5 * smooth.profile.prefill.base_ms, rel=0.01)
    # Arrow uses the usual time of a single prompt.
    assert stalled.ttft == smooth.ttft


def test_measuring_ends_at_its_time_budget() -> None:
    async def run() -> tuple[float, Bench]:
        bench = Bench()
        await bench.start()
        began_s = asyncio.get_running_loop().time()
        await bench.measure(3.0)
        return asyncio.get_running_loop().time() - began_s, bench

    took_s, bench = run_virtually(run())
    assert took_s <= 3.01 and "is used up" in bench.messages[-1]
    assert re.search(r"up to [1-9][\d,]* of [\d,]+ tokens of KV", bench.messages[-1])
    assert bench.engine.stats().requests == [], "a probe still runs"


def test_too_small_time_budget_is_reported() -> None:
    with pytest.raises(TooFewSamples, match=r"no samples|too few"):
        measured(SETTINGS, budget_s=0.05)


def test_probes_do_not_count_as_load() -> None:
    async def run() -> None:
        bench = Bench()
        await bench.start()
        for _ in range(3):
            bench.probes.submit(bench.engine, 100, 50)
        await asyncio.sleep(0.2)
        raw, shown = bench.engine.stats(), own_stats(bench.engine.stats(), bench.probes)
        assert len(raw.requests) == 3 and raw.kv_blocks_used > 0 and raw.generated_tokens > 0
        assert shown.requests == [] and shown.kv_blocks_used == 0 == shown.generated_tokens
        assert shown.token_interval_ms_mean == 0.0
        bench.probes.drop(bench.engine)
        assert bench.engine.stats().requests == []
        assert own_stats(bench.engine.stats(), bench.probes).generated_tokens == 0

    run_virtually(run())


def test_request_of_a_user_ends_the_measuring_and_is_served() -> None:
    async def run() -> None:
        bench = Bench()
        await bench.start()
        task = asyncio.create_task(bench.measure())
        await asyncio.sleep(0.5)
        bench.submit(40)
        with pytest.raises(ProbeFailed, match="a user's request came"):
            await task
        await asyncio.sleep(2.0)
        assert sum(sum(columns.counts) for columns in bench.users.steps) == 40

    run_virtually(run())


def test_measuring_does_not_wait_for_an_engine_that_fails_requests() -> None:
    async def run() -> None:
        bench = Bench(faults=SimulatedFaults(fail_at_index=3))
        await bench.start()
        with pytest.raises(ProbeFailed, match="ended after 3 of"):
            await bench.measure()

    run_virtually(run())


def test_plan_stays_within_the_engines_limits() -> None:
    small = msgspec.structs.replace(SETTINGS, kv_blocks=40, max_model_len=512, max_num_seqs=8)

    async def run() -> EngineInfo:
        return await Bench(small).start()

    info = run_virtually(run())
    assert max(prompt_lengths(info)) <= 510
    assert batches(info) and all(b.requests <= 8 and b.tokens <= 512 for b in batches(info))
    tokens = [batch.tokens for batch in batches(info)]
    assert tokens == sorted(tokens)
    assert kind_of(info).startswith("simulated-simulated-")


def test_fits_of_noise_have_no_negative_coefficients() -> None:
    """By rounding, a dropped coefficient can become negative in the next fit (seeds 40, 61)."""
    for seed in range(100):
        draw = np.random.default_rng(seed)
        count = int(draw.integers(5, 200))
        batch = draw.integers(1, 65, count).astype(float)
        length = draw.choice([32, 128, 512], count) + draw.uniform(0, 32, count)
        columns = (np.ones(count), batch, batch * length, batch * length**2, batch**2)
        tpot_s = 0.005 + 0.0001 * batch + draw.normal(0, 0.002, count)
        seen = np.stack(columns, axis=1)
        results = [ProbeResult(100, 32, 0.0, float(t), row) for t, row in zip(tpot_s, seen, strict=True)]
        found = _qoe(results)
        assert found is None or min(found.d) >= 0.0
