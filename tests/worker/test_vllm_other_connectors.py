"""Combination with other KV connectors: offloading to host memory stays in use, and requests move live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tailrace.handover import TransferMode
from tailrace.json_value import JsonValue
from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import SamplingParams

from tests.worker.cpu_offload import COPIES
from tests.worker.test_vllm_engine import idle
from tests.worker.vllm_bundle import Bundle, take_out
from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.errors import NoRoom
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.settings import EngineOptions

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
# Of the tiny model, in bytes: keys and values of 3 layers with 2 heads of 32 dimensions each, in float32.
BLOCK_BYTES = 2 * 3 * 2 * 32 * 4 * BLOCK
PROMPT = [*b"A prompt of several blocks, which are stored when they are computed and loaded again. " * 2]
# Leaves 23 blocks for requests.
KV_BLOCKS = 24
OFFLOADING: dict[str, JsonValue] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "tests.worker.cpu_offload",
        "cpu_bytes_to_use": 200 * BLOCK_BYTES,
    },
}
BESIDE: dict[str, JsonValue] = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [OFFLOADING]},
}


def greedy(tokens: int = 80) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[tuple[VllmEngine, Front]]:
    engine = VllmEngine(
        EngineOptions(
            model=str(MODEL_PATH),
            kv_blocks=KV_BLOCKS,
            arguments={
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_model_len": 512,
                "kv_transfer_config": BESIDE,
            },
        )
    )
    front = Front()
    info = await engine.start(front)
    assert (info.handover.mode, info.handover.reason) == (TransferMode.LIVE, "")
    assert engine.stats().host_kv_bytes_total == 0
    yield engine, front
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(engine: VllmEngine, front: Front) -> AsyncIterator[None]:
    yield
    COPIES.held = False
    await idle(engine)
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.requests, front.dead) == (0, [], "")


@pytest.fixture
def held_copies() -> Iterator[None]:
    COPIES.held = True
    yield
    COPIES.held = False


async def evict_device(engine: VllmEngine, front: Front, first: int) -> list[Stream]:
    """Run requests that use all blocks in turn, so that everything cached on the device is evicted."""
    streams = [front.stream([first + n] * (5 * BLOCK), greedy(4)) for n in range(5)]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    return streams


async def bring_in(engine: VllmEngine, bundle: Bundle, stream: Stream) -> None:
    """Import a request once no free block is being read any more."""
    await idle(engine)
    await bundle.bring_in(stream)


async def test_offloaded_blocks_are_loaded_and_moved(engine: VllmEngine, front: Front) -> None:
    reference = await front.run(engine, PROMPT, greedy())
    assert COPIES.stored_blocks >= len(PROMPT) // BLOCK
    await evict_device(engine, front, 60)
    loaded = COPIES.loaded_blocks
    moved = front.stream(PROMPT, greedy())
    front.submit(engine, moved)
    for at in (5, 30):
        bundle = await take_out(engine, front, moved, at)
        await engine.export_release(bundle.request_id)
        await bring_in(engine, bundle, moved)
    await front.until(lambda: moved.finished)
    assert COPIES.loaded_blocks == loaded + len(PROMPT) // BLOCK
    assert moved.tokens == reference.tokens


async def test_imported_request_is_stored_and_loaded(engine: VllmEngine, front: Front) -> None:
    """The stored blocks are the imported ones."""
    prompt = PROMPT[7:]
    moved = front.stream(prompt, greedy())
    front.submit(engine, moved)
    bundle = await take_out(engine, front, moved, 5)
    await engine.export_release(bundle.request_id)
    await evict_device(engine, front, 70)
    await bring_in(engine, bundle, moved)
    await front.until(lambda: moved.finished)
    await evict_device(engine, front, 80)
    loaded = COPIES.loaded_blocks
    again = await front.run(engine, prompt, greedy())
    assert COPIES.loaded_blocks > loaded
    assert again.tokens == moved.tokens


@pytest.mark.usefixtures("held_copies")
async def test_blocks_pending_to_be_stored_are_not_allocated(engine: VllmEngine, front: Front) -> None:
    prompt = PROMPT[3:]
    reference = await front.run(engine, prompt, greedy())
    moved = front.stream(prompt, greedy())
    front.submit(engine, moved)
    bundle = await take_out(engine, front, moved, 5)
    await engine.export_release(bundle.request_id)
    # The free blocks are theirs, and none of the copies has been made yet.
    ended = await evict_device(engine, front, 90)
    with pytest.raises(NoRoom, match="another KV connector is still reading"):
        await bundle.reserve(moved)
    COPIES.held = False
    while True:
        try:
            await bundle.bring_in(moved)
            break
        except NoRoom:
            await asyncio.sleep(0)
    await front.until(lambda: moved.finished)
    assert moved.tokens == reference.tokens
    # The blocks stored for the other requests are intact.
    await evict_device(engine, front, 100)
    for stream in await evict_device(engine, front, 90):
        assert stream.tokens == ended.pop(0).tokens


async def test_preempted_requests_resume_from_offloaded_blocks(engine: VllmEngine, front: Front) -> None:
    prompts = [PROMPT[n:] for n in range(10, 15)]
    alone = [await front.run(engine, prompt, greedy(120)) for prompt in prompts]
    before = engine.stats()
    streams = [front.stream(prompt, greedy(120)) for prompt in prompts]
    for stream in streams:
        front.submit(engine, stream)
    await front.until(lambda: all(stream.finished for stream in streams))
    assert engine.stats().preemptions > before.preemptions
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in alone]
