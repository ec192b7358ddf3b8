"""Preempted requests are swapped to host memory, and yield the same outputs as without swapping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tailrace.intra.orders import Fcfs
from tailrace.tiny import MODEL_PATH, REASONING_PARSER

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import SamplingParams

from tests.worker.test_vllm_engine import (
    ANSWERING,
    BLOCK,
    NO_THINK_END,
    QUESTION,
    REASONING,
    SEEDED,
    assert_same,
    idle,
    params,
    schema,
)
from tests.worker.vllm_bundle import Bundle
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.core import use_policy
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# Leaves 11 blocks for requests, and 20 in host memory.
KV_BLOCKS = 12
HOST_BLOCKS = 20
MODEL_LEN = 320
# Of the tiny model, in bytes: keys and values of 3 layers with 2 heads of 32 dimensions each, in float32.
BLOCK_BYTES = 2 * 3 * 2 * 32 * 4 * BLOCK
LENGTH = 80

# (prompt, parameters) of requests whose next token depends on more than their KV.
KINDS: dict[str, tuple[list[int], dict[str, object]]] = {
    "greedy": (REASONING, {"logit_bias": NO_THINK_END}),
    "seeded, penalties, logprobs": (ANSWERING, {**SEEDED}),
    "reasoning ends by itself": (QUESTION, {"temperature": 1.0, "seed": 5}),
    "stop token": (
        ANSWERING,
        {"temperature": 1.0, "seed": 4, "stop_token_ids": [*range(0, 250, 97)], "min_tokens": 60},
    ),
    "json schema": (ANSWERING, {"temperature": 1.0, "seed": 8, "ignore_eos": False}),
}


def kinds() -> list[tuple[list[int], SamplingParams]]:
    """Return fresh copies, because vLLM modifies the parameters."""
    fresh_kinds = []
    for name, (prompt, changes) in KINDS.items():
        more = {"structured_outputs": schema()} if name == "json schema" else {}
        sampling = params(**({"max_tokens": LENGTH} | changes | more))
        sampling.update_from_generation_config({}, 258)
        fresh_kinds.append((prompt, sampling))
    return fresh_kinds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[tuple[VllmEngine, Front]]:
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=KV_BLOCKS,
            host_kv_bytes=HOST_BLOCKS * BLOCK_BYTES,
            # Without a prefix cache, all blocks of a resumed request come from host memory.
            arguments={
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_model_len": MODEL_LEN,
                "reasoning_parser": REASONING_PARSER,
                "max_num_batched_tokens": 256,
                "enable_prefix_caching": False,
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    assert info.kv_shape.block_bytes == BLOCK_BYTES
    yield engine, front
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(started: tuple[VllmEngine, Front]) -> list[Stream]:
    """Return the outputs of each kind when it runs alone."""
    engine, front = started
    return [await front.run(engine, *kind) for kind in kinds()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(started: tuple[VllmEngine, Front]) -> Stream:
    """The outputs of one request of `crowd` when it runs alone."""
    engine, front = started
    return await front.run(engine, ANSWERING, params(max_tokens=LENGTH, **SEEDED))


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(engine: VllmEngine, front: Front) -> AsyncIterator[None]:
    """Check that every test ends with no request, no block and no host memory in use."""
    engine.set_intra("vllm")
    yield
    await idle(engine)
    stats = engine.stats()
    engine.abort_client(0)
    assert (stats.kv_blocks_used, stats.host_kv_bytes_used, stats.requests) == (0, 0, [])
    assert stats.host_kv_bytes_total == HOST_BLOCKS * BLOCK_BYTES
    assert not front.dead


async def run_together(engine: VllmEngine, front: Front) -> list[Stream]:
    streams = [front.stream(*kind) for kind in kinds()]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    return streams


@pytest.mark.parametrize("intra", ["vllm", pytest.param("round_robin", marks=pytest.mark.slow), "pascal"])
async def test_swapping_does_not_change_outputs(
    engine: VllmEngine, front: Front, alone: list[Stream], intra: str
) -> None:
    """More requests than the device has room for, in every order: the same outputs as alone."""
    engine.set_intra(intra)
    before = engine.stats()
    together = await run_together(engine, front)
    after = engine.stats()
    for stream, undisturbed in zip(together, alone, strict=True):
        assert_same(stream, undisturbed)
    assert after.swaps_out > before.swaps_out
    assert after.swaps_in - before.swaps_in == after.swaps_out - before.swaps_out
    assert after.host_kv_corrupt_blocks == before.host_kv_corrupt_blocks


async def crowd(engine: VllmEngine, front: Front, number: int = 5) -> list[Stream]:
    """Start seeded requests that fill the device, and wait until one of them is in host memory."""
    streams = [front.stream(ANSWERING, params(max_tokens=LENGTH, **SEEDED)) for _ in range(number)]
    swapped = engine.stats().swaps_out
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: engine.stats().swaps_out > swapped)
    return streams


async def finish(front: Front, streams: list[Stream], reference: Stream) -> None:
    """Wait for all streams and check that they equal the request alone."""
    await front.until(lambda: all(stream.finished for stream in streams))
    for stream in streams:
        assert_same(stream, reference)


def states(engine: VllmEngine) -> dict[str, str]:
    return {entry.request_id: entry.state for entry in engine.stats().requests}


async def swapped_stream(engine: VllmEngine, front: Front, streams: list[Stream]) -> tuple[Stream, Bundle]:
    """Return a swapped-out stream of `crowd` and its export, which is paused."""
    while True:
        for stream in streams:
            if states(engine).get(stream.request_id) != "preempted":
                continue
            bundle = Bundle(engine, stream.request_id)
            try:
                await bundle.open()
                await bundle.stop_and_copy()
            except EngineRefusal:
                # It recomputes its prompt, or has ended.
                await engine.export_resume(stream.request_id)
                continue
            return stream, bundle
        if all(stream.finished for stream in streams):
            # On a busy machine, they can end before one of them is paused.
            streams[:] = await crowd(engine, front, len(streams))
        await asyncio.sleep(0)


async def test_swapped_request_is_exported_and_continues_at_its_source(
    engine: VllmEngine, front: Front, reference: Stream
) -> None:
    streams = await crowd(engine, front)
    stream, bundle = await swapped_stream(engine, front, streams)
    assert states(engine)[stream.request_id] == "paused"
    assert stream.tokens == [*bundle.exported.output_token_ids, *bundle.pause.new_output_token_ids]
    await engine.export_resume(stream.request_id)
    await finish(front, streams, reference)


async def test_swapped_request_moves(engine: VllmEngine, front: Front, reference: Stream) -> None:
    """Its KV is read from host memory and imported into an engine with room again."""
    streams = await crowd(engine, front)
    stream, bundle = await swapped_stream(engine, front, streams)
    await engine.export_release(stream.request_id)
    others = [other for other in streams if other is not stream]
    await front.until(lambda: all(other.finished for other in others))
    await bundle.bring_in(stream)
    await finish(front, streams, reference)


async def test_import_waits_in_host_memory_when_the_device_is_full(
    engine: VllmEngine, front: Front, reference: Stream
) -> None:
    moved = front.stream(ANSWERING, params(max_tokens=LENGTH, **SEEDED))
    front.submit(engine, moved)
    await front.until_tokens(moved, 40)
    bundle = Bundle(engine, moved.request_id)
    await bundle.open()
    await bundle.stop_and_copy()
    await engine.export_release(moved.request_id)
    streams = await crowd(engine, front)
    with pytest.raises(EngineRefusal, match="no room"):
        await bundle.reserve(moved)
    # With PASCAL, answering requests wait in host memory.
    engine.set_intra("pascal")
    used = engine.stats().swaps_in
    await bundle.bring_in(moved)
    await finish(front, [*streams, moved], reference)
    assert engine.stats().swaps_in > used


async def test_import_into_host_memory_is_dropped(
    engine: VllmEngine, front: Front, reference: Stream
) -> None:
    moved = front.stream(ANSWERING, params(max_tokens=LENGTH, **SEEDED))
    front.submit(engine, moved)
    await front.until_tokens(moved, 40)
    bundle = Bundle(engine, moved.request_id)
    await bundle.open()
    await bundle.stop_and_copy()
    await engine.export_release(moved.request_id)
    engine.set_intra("pascal")
    streams = await crowd(engine, front)
    for dropped_after in ("open", "write", "prepare"):
        await bundle.reserve(moved)
        if dropped_after != "open":
            await bundle.write()
        if dropped_after == "prepare":
            await engine.import_prepare(bundle.request_id, bundle.pause)
        await engine.import_drop(bundle.request_id)
    engine.abort([moved.key])
    await finish(front, streams, reference)


async def test_block_changed_in_host_memory_is_recomputed(
    engine: VllmEngine, front: Front, reference: Stream
) -> None:
    pool = engine._parts.core.host_pool
    assert pool is not None
    load = pool.load

    def corrupt(slots: Sequence[int], block_ids: Sequence[int], names: Sequence[bytes]) -> list[int]:
        pool._memory.bytes[slots[0], 0, 0] ^= 1
        return load(slots, block_ids, names)

    before = engine.stats().host_kv_corrupt_blocks
    pool.load = corrupt  # type: ignore[method-assign]
    try:
        streams = await crowd(engine, front)
        await finish(front, streams, reference)
    finally:
        pool.load = load  # type: ignore[method-assign]
    assert engine.stats().host_kv_corrupt_blocks > before


async def test_prompt_is_recomputed_without_room_in_host_memory(
    engine: VllmEngine, front: Front, reference: Stream
) -> None:
    before = engine.stats()
    host_slots = engine._parts.core.host.allocate(HOST_BLOCKS - 2)
    assert host_slots is not None
    streams = [front.stream(ANSWERING, params(max_tokens=LENGTH, **SEEDED)) for _ in range(5)]
    for stream in streams:
        front.submit(engine, stream)
    await finish(front, streams, reference)
    engine._parts.core.host.release(host_slots)
    after = engine.stats()
    assert after.swaps_refused > before.swaps_refused


async def test_aborted_request_frees_its_host_memory(engine: VllmEngine, front: Front) -> None:
    streams = await crowd(engine, front)
    engine.abort([stream.key for stream in streams])
    await idle(engine)
    assert engine.stats().host_kv_bytes_used == 0


@pytest.mark.parametrize("pass_over", [0.0, 1.0])
async def test_small_request_passes_a_larger_one_only_if_the_order_allows_it(
    engine: VllmEngine, front: Front, pass_over: float
) -> None:
    await engine._run(lambda parts: use_policy(Fcfs(pass_over=pass_over), parts))
    # Half of the device for longer than the small one runs, all of it, and a quarter.
    running = front.stream(ANSWERING, params(max_tokens=BLOCK * 5 - len(ANSWERING)))
    front.submit(engine, running)
    await front.until_tokens(running, 2)
    large = front.stream((ANSWERING * 4)[: BLOCK * 9], params(max_tokens=2))
    small = front.stream(ANSWERING[:BLOCK], params(max_tokens=2))
    for stream in (large, small):
        front.submit(engine, stream)
    await front.until_tokens(small, 1)
    assert bool(large.tokens) == (not pass_over)
    await front.until(lambda: all(stream.finished for stream in (running, large, small)))
