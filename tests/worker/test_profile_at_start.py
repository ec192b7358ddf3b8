"""`--profile-at-start`: of equal workers that start together, one measures for all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import nullcontext

import msgspec
import pytest
import pytest_asyncio

from tailrace.records import PROFILES, ProfileRecord
from tailrace.store.store import Store
from tests.counting import failures_of
from tests.waiting import WAIT_S
from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.simulated import SimulatedEngine, SimulatedFaults, SimulatedSettings
from worker_agent.profiling.probes import Probes
from worker_agent.profiling.profiler import Profiler, ProfilingFailed

SETTINGS = SimulatedSettings(kv_blocks=256, max_model_len=512, max_num_seqs=8, speed=10.0)
# The whole plan takes a fraction of a second, or as long as a busy machine takes.
BUDGET_S = WAIT_S


class NoUsers:
    """Engine sink that must not be used."""

    def on_step(self, columns: StepColumns) -> None:
        raise AssertionError("an output of nobody's")

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("nothing was called")

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest_asyncio.fixture
async def store(etcd: str) -> AsyncIterator[Store]:
    store = await Store.connect([etcd], f"profiles-{uuid.uuid4().hex[:8]}")
    yield store
    await store.close()


async def worker(name: str, store: Store, faults: SimulatedFaults | None = None) -> Profiler:
    """Return the profiler of a started engine."""
    engine = SimulatedEngine(SETTINGS, faults=faults)
    probes = Probes(NoUsers(), asyncio.get_running_loop().time)
    info = await engine.start(probes)
    return Profiler(name, engine, info, probes, (), store, lambda: 0.1, nullcontext)


async def stored(store: Store, kind: str) -> ProfileRecord | None:
    value = await store.get(f"{PROFILES}{kind}")
    return None if value is None else msgspec.json.decode(value, type=ProfileRecord)


async def test_one_of_several_equal_workers_is_measured(store: Store) -> None:
    workers = [await worker(f"w-{n}", store) for n in range(3)]
    await asyncio.gather(*(each.at_start(BUDGET_S) for each in workers))
    first = await stored(store, workers[0].kind)
    assert first is not None and {each.kind for each in workers} == {first.kind}
    assert await store.get_prefix("profiling/") == {}, "the lock was not released"
    # A worker that starts later finds the profile.
    await (await worker("w-9", store)).at_start(BUDGET_S)
    assert await stored(store, first.kind) == first


async def test_worker_starts_whatever_measuring_leads_to(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*_: object) -> object:
        raise KeyError("nobody foresaw this")

    mistaken, before = await worker("w", store), failures_of("profiling")
    with monkeypatch.context() as patch:
        patch.setattr("worker_agent.profiling.profiler.measure", measure)
        await mistaken.at_start(BUDGET_S)
        with pytest.raises(ProfilingFailed, match="w: KeyError: 'nobody foresaw this'"):
            await mistaken.profile(print, budget_s=BUDGET_S)
    assert failures_of("profiling") == before + 2
    assert await store.get_prefix("profiling/") == {}
    # The same worker can be profiled later.
    await mistaken.profile(print, budget_s=BUDGET_S)
    assert await stored(store, mistaken.kind) is not None


async def test_worker_starts_even_if_measuring_fails(store: Store) -> None:
    broken = await worker("w", store, SimulatedFaults(fail_at_index=0))
    await broken.at_start(BUDGET_S)
    assert await stored(store, broken.kind) is None
    assert await store.get_prefix("profiling/") == {}
    # The next worker tries again.
    await (await worker("v", store)).at_start(BUDGET_S)
    found = await stored(store, broken.kind)
    assert found is not None and found.instance_id == "v"
