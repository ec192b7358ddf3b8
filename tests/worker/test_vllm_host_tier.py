"""Prefixes evicted from the device are cached in host memory and loaded unchanged, or recomputed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tailrace.cache.book import CacheBook
from tailrace.cache.index import Tier
from tailrace.cache.names import Naming, block_names
from tailrace.tiny import MODEL_PATH, REASONING_PARSER

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import SamplingParams

from tests.models.triton_on_cpu import is_requested
from tests.waiting import WAIT_S
from tests.worker.test_vllm_engine import assert_same, idle, params
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.base import EngineInfo, Submission
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.host_pool import HostPool
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
KV_BLOCKS = 25
HOST_BLOCKS = 60
# Of the tiny model, in bytes: keys and values of 3 layers with 2 heads of 32 dimensions each, in float32.
BLOCK_BYTES = 2 * 3 * 2 * 32 * 4 * BLOCK
PREFIX_BLOCKS = 10


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    # Async scheduling is vLLM's default.
    params=[pytest.param(False, marks=pytest.mark.slow), True],
    ids=["sync", "async"],
)
async def started(request: pytest.FixtureRequest) -> AsyncIterator[tuple[VllmEngine, Front, EngineInfo]]:
    """Engines without and with async scheduling, one after the other."""
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=KV_BLOCKS,
            host_kv_bytes=HOST_BLOCKS * BLOCK_BYTES,
            arguments={
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_model_len": 640,
                "reasoning_parser": REASONING_PARSER,
                "async_scheduling": request.param,
                "max_num_batched_tokens": 256,
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    assert await engine._run(lambda parts: parts.core.config.use_v2_model_runner) == is_requested()
    yield engine, front, info
    await engine.stop()


@pytest.fixture
def book(started: tuple[VllmEngine, Front, EngineInfo]) -> CacheBook:
    assert started[2].cache is not None
    return started[2].cache


@pytest.fixture
def naming(started: tuple[VllmEngine, Front, EngineInfo]) -> Naming:
    assert started[2].naming is not None
    return started[2].naming


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(engine: VllmEngine, front: Front) -> AsyncIterator[None]:
    """Start every test with empty caches, and check that nothing is in use at its end."""
    await forget_all(engine)
    engine.set_intra("vllm")
    yield
    await idle(engine)
    stats = engine.stats()
    engine.abort_client(0)
    assert (stats.kv_blocks_used, stats.host_kv_bytes_used, stats.requests) == (0, 0, [])
    assert not front.dead


async def forget_host(engine: VllmEngine) -> None:
    await engine._run(lambda parts: parts.core.host.discard_all())


async def forget_all(engine: VllmEngine) -> None:
    assert await engine._run(lambda parts: parts.core.core.reset_prefix_cache())
    assert engine.stats().host_cached_bytes == 0


def prompt_of(number: int) -> list[int]:
    """Return a prompt of ten blocks and five tokens, different for each number."""
    return [(number + 3) * n * n % 241 for n in range(PREFIX_BLOCKS * BLOCK + 5)]


def sampling(**changes: object) -> SamplingParams:
    return params(**({"temperature": 1.0, "seed": 6, "max_tokens": 24} | changes))


def count_in_tier(book: CacheBook, names: Sequence[int], tier: Tier) -> int:
    """Return how many of these names the book has in a tier."""
    present = {name for change in book.snapshot()[1] if change.tier is tier for name in change.stored}
    return len(present.intersection(names))


async def evict(engine: VllmEngine, front: Front) -> None:
    """Evict all cached blocks of the device by running other requests."""
    for number in range(2):
        await front.run(engine, [(11 + number) * n % 197 for n in range(18 * BLOCK)], sampling(max_tokens=2))
    await idle(engine)


async def test_evicted_prefix_comes_back_without_recomputation(
    engine: VllmEngine, front: Front, book: CacheBook, naming: Naming
) -> None:
    names = block_names(prompt_of(1), naming)
    assert len(names) == PREFIX_BLOCKS
    reference = await front.run(engine, prompt_of(1), sampling())
    assert (count_in_tier(book, names, Tier.DEVICE), count_in_tier(book, names, Tier.HOST)) == (
        PREFIX_BLOCKS,
        0,
    )
    await evict(engine, front)
    assert (count_in_tier(book, names, Tier.DEVICE), count_in_tier(book, names, Tier.HOST)) == (
        0,
        PREFIX_BLOCKS,
    )
    # Occupy blocks, so that the prefix must be loaded into other blocks than before.
    other = front.stream(prompt_of(2)[: 3 * BLOCK], sampling(max_tokens=200))
    front.submit(engine, other)
    await front.until_tokens(other, 3)
    before = engine.stats()
    again = await front.run(engine, prompt_of(1), sampling())
    assert_same(again, reference)
    await idle(engine)
    after = engine.stats()
    assert after.host_blocks_loaded - before.host_blocks_loaded == PREFIX_BLOCKS
    assert after.host_cached_prompt_tokens - before.host_cached_prompt_tokens == PREFIX_BLOCKS * BLOCK
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == PREFIX_BLOCKS * BLOCK
    assert count_in_tier(book, names, Tier.DEVICE) == count_in_tier(book, names, Tier.HOST) == PREFIX_BLOCKS
    engine.abort([other.key])
    # Now it is on the device, and host memory is not needed.
    once_more = await front.run(engine, prompt_of(1), sampling())
    assert_same(once_more, reference)
    assert engine.stats().host_blocks_loaded == after.host_blocks_loaded


async def test_only_blocks_missing_on_the_device_are_loaded(engine: VllmEngine, front: Front) -> None:
    """The device has the first blocks, host memory the next ones, and the rest must be computed."""
    prompt = prompt_of(1)
    reference = await front.run(engine, prompt, sampling())
    await forget_all(engine)
    await front.run(engine, prompt[: 7 * BLOCK + 1], sampling(max_tokens=2))
    await evict(engine, front)
    await front.run(engine, prompt[: 4 * BLOCK + 1], sampling(max_tokens=2))
    before = engine.stats()
    assert_same(await front.run(engine, prompt, sampling()), reference)
    after = engine.stats()
    assert after.host_blocks_loaded - before.host_blocks_loaded == 3
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 7 * BLOCK


async def test_requests_with_one_prefix_wait_for_one_load(engine: VllmEngine, front: Front) -> None:
    references = [await front.run(engine, [*prompt_of(1), n], sampling()) for n in range(3)]
    await evict(engine, front)
    before = engine.stats()
    streams = [front.stream([*prompt_of(1), n], sampling()) for n in range(3)]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    for stream, reference in zip(streams, references, strict=True):
        assert_same(stream, reference)
    assert engine.stats().host_blocks_loaded - before.host_blocks_loaded == PREFIX_BLOCKS


class HeldLoads:
    """Hold the engine's loads from host memory until `close`."""

    def __init__(self, engine: VllmEngine) -> None:
        pool = engine._parts.core.host_pool
        assert pool is not None
        self.pool: HostPool = pool
        self.begun = threading.Event()
        self.go = threading.Event()
        self._load = pool.load
        pool.load = self.load  # type: ignore[method-assign]

    def load(self, slots: Sequence[int], block_ids: Sequence[int], names: Sequence[bytes]) -> list[int]:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        return self._load(slots, block_ids, names)

    def close(self) -> None:
        self.go.set()
        self.pool.load = self._load  # type: ignore[method-assign]


async def test_other_requests_continue_during_a_load(engine: VllmEngine, front: Front) -> None:
    reference = await front.run(engine, prompt_of(1), sampling())
    await evict(engine, front)
    other = front.stream(prompt_of(2)[:BLOCK], sampling(max_tokens=200))
    front.submit(engine, other)
    await front.until_tokens(other, 2)
    loads = HeldLoads(engine)
    try:
        stream = front.stream(prompt_of(1), sampling())
        front.submit(engine, stream)
        assert await asyncio.to_thread(loads.begun.wait, WAIT_S)
        await front.until_tokens(other, len(other.tokens) + 20)
        assert not stream.tokens
    finally:
        loads.close()
    await front.until(lambda: stream.finished)
    assert_same(stream, reference)
    engine.abort([other.key])


async def test_request_ends_before_its_load_completes(engine: VllmEngine, front: Front) -> None:
    """Its blocks stay allocated until then; a request with the same ID is submitted meanwhile."""
    reference = await front.run(engine, prompt_of(1), sampling())
    await evict(engine, front)
    loads = HeldLoads(engine)
    try:
        stream = front.stream(prompt_of(1), sampling())
        front.submit(engine, stream)
        assert await asyncio.to_thread(loads.begun.wait, WAIT_S)
        engine.abort([stream.key])
        assert await engine.find_held([stream.key]) == {}
        assert engine.stats().kv_blocks_used >= PREFIX_BLOCKS
        # The engine thread waits for the load, because request IDs must be unique.
        threading.Timer(0.2, loads.go.set).start()
        stream.epoch += 1
        front.submit(engine, stream)
        await front.until(lambda: stream.finished)
        assert_same(stream, reference)
    finally:
        loads.close()


async def test_corrupt_blocks_are_recomputed_and_forgotten(
    engine: VllmEngine, front: Front, book: CacheBook, naming: Naming
) -> None:
    names = block_names(prompt_of(1), naming)
    reference = await front.run(engine, prompt_of(1), sampling())
    await evict(engine, front)

    def corrupt(number: int) -> None:
        core = engine._parts.core
        assert core.host_pool is not None
        hashes = core.decode(front.stream(prompt_of(1), sampling()).frames, 0).block_hashes
        core.host_pool._memory.bytes[core.host.find([bytes(name) for name in hashes])[number], 1, 3] ^= 1

    await engine._run(lambda parts: corrupt(6))
    before = engine.stats()
    assert_same(await front.run(engine, prompt_of(1), sampling()), reference)
    await idle(engine)
    after = engine.stats()
    assert after.host_kv_corrupt_blocks - before.host_kv_corrupt_blocks == 1
    assert count_in_tier(book, names[:6], Tier.HOST) == 6
    assert count_in_tier(book, names[6:7], Tier.HOST) == 0
    await forget_all(engine)
    await front.run(engine, prompt_of(1), sampling())
    await evict(engine, front)
    # The first block is corrupt, so that none can be used.
    await engine._run(lambda parts: corrupt(0))
    assert_same(await front.run(engine, prompt_of(1), sampling()), reference)
    assert engine.stats().host_kv_corrupt_blocks - after.host_kv_corrupt_blocks == 1


async def test_blocks_evicted_between_steps_are_cached(engine: VllmEngine, front: Front) -> None:
    """A fetch writes to the blocks that it allocates outside of any step."""
    reference = await front.run(engine, prompt_of(1), sampling())
    other = front.stream([n * 5 % 239 for n in range(20 * BLOCK - 3)], sampling(max_tokens=2))
    submission = Submission(other.key, other.request_id, 1, other.frames)
    assert len(await engine.fetch_open("fetch", submission, 1 << 20)) == 19
    await engine._run(
        lambda parts: parts.core.kv.zero([b.block_id for b in parts.fetches._fetches["fetch"].blocks])
    )
    await engine.fetch_drop("fetch")
    before = engine.stats()
    assert_same(await front.run(engine, prompt_of(1), sampling()), reference)
    after = engine.stats()
    loaded = after.host_blocks_loaded - before.host_blocks_loaded
    found = after.cached_prompt_tokens - before.cached_prompt_tokens
    assert loaded >= PREFIX_BLOCKS - 5 and found == PREFIX_BLOCKS * BLOCK


async def test_blocks_in_host_memory_can_be_lent(engine: VllmEngine, front: Front) -> None:
    """The device has the first blocks, host memory all: both can be lent, and read whatever is evicted."""
    reference = await front.run(engine, prompt_of(1), sampling())
    await evict(engine, front)
    await front.run(engine, prompt_of(1)[: 3 * BLOCK + 1], sampling(max_tokens=2))
    stream = front.stream(prompt_of(1), sampling())
    submission = Submission(stream.key, stream.request_id, 1, stream.frames)
    names = await engine._run(
        lambda parts: [bytes(name) for name in parts.core.decode(stream.frames, 0).block_hashes]
    )
    # Blocks in host memory need not be fetched.
    assert await engine.fetch_open("held", submission, 1 << 20) == []
    assert await engine.loan_open("loan", names) == PREFIX_BLOCKS
    assert await engine.loan_open("other", [b"unknown", *names]) == 0
    assert await engine.loan_open("rest", names[5:]) == PREFIX_BLOCKS - 5
    await forget_host(engine)
    number = 20
    dropped = engine.stats().host_blocks_dropped
    while engine.stats().host_blocks_dropped < dropped + HOST_BLOCKS:
        await front.run(engine, prompt_of(number), sampling(max_tokens=2))
        number += 1
    # Three blocks are pinned on the device.
    missing = await engine.fetch_open("fetch", submission, 1 << 20)
    assert missing == names[3:]
    staging = engine.staging(PREFIX_BLOCKS)
    assert isinstance(staging, DeviceStaging)
    sums = await engine.read_blocks("loan", 0, PREFIX_BLOCKS, staging)
    rest = engine.staging(PREFIX_BLOCKS - 5)
    assert isinstance(rest, DeviceStaging)
    assert await engine.read_blocks("rest", 0, PREFIX_BLOCKS - 5, rest) == sums[5:]
    await engine.write_blocks("fetch", 0, PREFIX_BLOCKS - 3, staging.part(3, PREFIX_BLOCKS - 3), sums[3:])
    await engine.fetch_keep("fetch", PREFIX_BLOCKS - 3)
    await engine.fetch_drop("fetch")
    for loan in ("loan", "other", "rest"):
        await engine.loan_end(loan)
    before = engine.stats()
    assert_same(await front.run(engine, prompt_of(1), sampling()), reference)
    after = engine.stats()
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == PREFIX_BLOCKS * BLOCK
    assert after.host_blocks_loaded == before.host_blocks_loaded


async def test_requests_take_precedence_over_cached_blocks(engine: VllmEngine, front: Front) -> None:
    """Host memory is full of prefixes; preempted requests replace them and resume unchanged."""
    prompts = [prompt_of(9)[: 2 * BLOCK + n] for n in range(5)]
    alone = [await front.run(engine, prompt, sampling(max_tokens=130)) for prompt in prompts]
    number = 20
    while engine.stats().host_cached_bytes < HOST_BLOCKS * BLOCK_BYTES:
        await front.run(engine, prompt_of(number), sampling(max_tokens=2))
        number += 1
    before = engine.stats()
    streams = [front.stream(prompt, sampling(max_tokens=130)) for prompt in prompts]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    for stream, reference in zip(streams, alone, strict=True):
        assert_same(stream, reference)
    after = engine.stats()
    assert after.swaps_out > before.swaps_out
    assert after.swaps_refused == before.swaps_refused
    assert after.host_blocks_dropped > before.host_blocks_dropped


@pytest.mark.parametrize("intra", [pytest.param("vllm", marks=pytest.mark.slow), "pascal"])
async def test_random_prefixes_and_aborts(engine: VllmEngine, front: Front, intra: str) -> None:
    """More prefixes than both tiers can hold, in random order with random aborts: all answers are
    unchanged."""
    dice = random.Random(4)
    prompts = [[*prompt_of(n)[: blocks * BLOCK], n, 7] for n in range(12) for blocks in (4, PREFIX_BLOCKS)]
    references = [await front.run(engine, prompt, sampling(max_tokens=8)) for prompt in prompts]
    await forget_all(engine)
    engine.set_intra(intra)
    before = engine.stats()
    running: list[tuple[Stream, Stream]] = []
    for _ in range(120):
        number = dice.randrange(len(prompts))
        stream = front.stream(prompts[number], sampling(max_tokens=8))
        front.submit(engine, stream)
        running.append((stream, references[number]))
        if dice.random() < 0.15:
            aborted, _ = running.pop(dice.randrange(len(running)))
            engine.abort([aborted.key])
        if len(running) > 6:
            first = running[0][0]
            await front.until(lambda first=first: first.finished)  # type: ignore[misc]
            for stream, reference in [each for each in running if each[0].finished]:
                assert_same(stream, reference)
            running = [each for each in running if not each[0].finished]
    await front.until(lambda: all(stream.finished for stream, _ in running))
    for stream, reference in running:
        assert_same(stream, reference)
    after = engine.stats()
    assert after.host_blocks_loaded - before.host_blocks_loaded > 100
    assert after.host_blocks_dropped > before.host_blocks_dropped
    assert after.host_kv_corrupt_blocks == before.host_kv_corrupt_blocks
