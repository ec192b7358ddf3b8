"""Gather, checksum and scatter of KV blocks, over the layouts of KV tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.engine.vllm.kv_blocks import KvBlocks, odd_weight_sums

BLOCKS, LAYERS = 11, 3
# Blocks first; keys and values separate; kernel blocks of half the size of a pool's block.
LAYOUTS = [(BLOCKS, 2, 16, 8), (2, BLOCKS, 16, 8), (2 * BLOCKS, 2, 8, 8)]


def tensors(layout: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(layout, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        for _ in range(LAYERS)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_arrive_unchanged_and_nothing_else_changes(layout: tuple[int, ...]) -> None:
    sent, kept = tensors(layout, 1), tensors(layout, 2)
    source = KvBlocks(sent, BLOCKS)
    size = source.num_layers * source.layer_block_bytes
    memory = np.zeros(4 * size, np.uint8)
    staging = source.staging_over(memory)
    assert staging is not None
    sums = source.gather([7, 0, 3], staging)
    # The checksum covers the bytes in transfer order.
    travels = memory.tobytes()
    assert sums == [xxhash.xxh3_64_intdigest(travels[n * size : (n + 1) * size]) for n in range(3)]
    before = [layer.clone() for layer in kept]
    target = KvBlocks(kept, BLOCKS)
    received = target.staging_over(memory)
    assert received is not None
    target.verify(received, sums, 0)
    target.scatter(received, [2, 5, 9])
    of_source, of_target = KvBlocks(sent, BLOCKS), KvBlocks(before, BLOCKS)
    for target_block, source_block in {2: 7, 5: 0, 9: 3}.items():
        assert target.gather([target_block], target.staging(1)) == of_source.gather(
            [source_block], of_source.staging(1)
        )
    untouched = [number for number in range(BLOCKS) if number not in (2, 5, 9)]
    assert target.gather(untouched, target.staging(8)) == of_target.gather(untouched, of_target.staging(8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_gathered_to_any_rows(layout: tuple[int, ...]) -> None:
    kv = KvBlocks(tensors(layout, 1), BLOCKS)
    assert kv.on_host
    in_order, apart = kv.staging(3), kv.staging(6)
    apart.bytes.zero_()
    assert kv.gather_to([7, 0, 3], apart, [4, 1, 5]) == kv.gather([7, 0, 3], in_order)
    assert torch.equal(apart.bytes[[4, 1, 5]], in_order.bytes)
    assert not apart.bytes[[0, 2, 3]].any()


@pytest.mark.parametrize("layout", [*LAYOUTS, (BLOCKS, 1, 3, 1), (BLOCKS, 2, 16, 8)])
@pytest.mark.parametrize("ids", [[4], [7, 0, 3], list(range(BLOCKS))])
def test_a_device_moves_the_bytes_that_a_host_moves(layout: tuple[int, ...], ids: list[int]) -> None:
    """Computed by torch on the device of the KV, here the CPU."""
    sent = tensors(layout, 1)
    host, device = KvBlocks(sent, BLOCKS), KvBlocks(sent, BLOCKS)
    device._rows = []
    expected, found = host.staging(BLOCKS), device.staging(BLOCKS)
    assert device.gather(ids, found) == host.gather(ids, expected)
    assert torch.equal(found.bytes[: len(ids)], expected.bytes[: len(ids)])
    targets = [BLOCKS - 1 - number for number in ids]
    of_host, of_device = tensors(layout, 2), tensors(layout, 2)
    KvBlocks(of_host, BLOCKS).scatter(expected, targets)
    written = KvBlocks(of_device, BLOCKS)
    written._rows = []
    written.scatter(found, targets)
    assert all(torch.equal(a, b) for a, b in zip(of_host, of_device, strict=True))


def test_every_corrupt_byte_is_detected() -> None:
    kv = KvBlocks(tensors(LAYOUTS[0], 1), BLOCKS)
    staging = kv.staging(2)
    sums = kv.gather([4, 5], staging)
    flat = staging.bytes.view(-1)
    for place in range(0, len(flat), 97):
        flat[place] ^= 0x10
        with pytest.raises(KvCorrupt):
            kv.verify(staging, sums, 0)
        flat[place] ^= 0x10
    kv.verify(staging, sums, 0)


def test_gpu_checksum_detects_changed_and_swapped_words() -> None:
    """It is computed by torch on the device of the bytes, here the CPU."""
    blocks = torch.randint(0, 256, (5, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    sums = odd_weight_sums(blocks)
    assert len(set(sums)) == 5 and all(0 <= each < 1 << 64 for each in sums)
    for place in (0, 1, 2047, 4095):
        damaged = blocks.clone()
        damaged[2, place] ^= 1
        assert [a == b for a, b in zip(odd_weight_sums(damaged), sums, strict=True)] == [
            True,
            True,
            False,
            True,
            True,
        ]
    swapped = blocks.clone()
    swapped[0, 8:16], swapped[0, 16:24] = blocks[0, 16:24], blocks[0, 8:16]
    assert odd_weight_sums(swapped)[0] != sums[0]


def test_a_device_without_memory_refuses_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KvBlocks(tensors(LAYOUTS[0], 1), BLOCKS)

    def without_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 32 MiB")

    monkeypatch.setattr(torch, "empty", without_memory)
    with pytest.raises(EngineRefusal, match="no memory for a transfer: tried to allocate"):
        kv.staging(2)
    with pytest.raises(EngineRefusal, match="no memory for a transfer"), kv.stream():
        without_memory()
