"""Blocks saved to host memory are loaded unchanged into other blocks, or found to be corrupt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from worker_agent.engine.vllm.host_pool import HostPool
    from worker_agent.engine.vllm.kv_blocks import KvBlocks

pytestmark = pytest.mark.vllm

BLOCKS, SLOTS = 8, 6
NAMES = [b"a", b"b", b"c"]


def kv_of(layers: list[torch.Tensor]) -> KvBlocks:
    from worker_agent.engine.vllm.kv_blocks import KvBlocks

    return KvBlocks(layers, BLOCKS)


def layers_on_host() -> list[torch.Tensor]:
    """Return layers of which blocks are copied row by row."""
    return [torch.randn(BLOCKS, 2, 4, 8) for _ in range(3)]


def layers_by_torch() -> list[torch.Tensor]:
    """Return layers whose last dimension is not contiguous: torch copies them, as on a GPU."""
    return [torch.randn(BLOCKS, 2, 8, 4).transpose(2, 3) for _ in range(3)]


def pool_of(kv: KvBlocks) -> HostPool:
    from worker_agent.engine.vllm.host_pool import HostPool

    pool = HostPool(kv, SLOTS * kv.num_layers * kv.layer_block_bytes)
    assert pool.slots == SLOTS
    return pool


@pytest.mark.parametrize(("make", "on_host"), [(layers_on_host, True), (layers_by_torch, False)])
def test_saved_blocks_are_loaded_into_other_blocks(make: object, on_host: bool) -> None:
    assert callable(make)
    layers = make()
    kv = kv_of(layers)
    assert kv.on_host is on_host
    pool = pool_of(kv)
    wanted = [layer[[5, 0, 2]].clone() for layer in layers]
    pool.save([5, 0, 2], [4, 1, 3], NAMES)
    others = [layer[[0, 2, 5]].clone() for layer in layers]
    assert pool.load([4, 1, 3], [7, 6, 1], NAMES) == []
    for layer, expected, other in zip(layers, wanted, others, strict=True):
        assert torch.equal(layer[[7, 6, 1]], expected)
        assert torch.equal(layer[[0, 2, 5]], other)
    assert pool.corrupt_blocks == 0


def test_saved_slot_is_read_with_its_checksum() -> None:
    kv = kv_of(layers_on_host())
    pool = pool_of(kv)
    pool.save([5, 0], [4, 1], NAMES[:2])
    staging, expected = kv.staging(2), kv.staging(2)
    assert pool.read([1, 4], staging) == kv.gather([0, 5], expected)
    assert torch.equal(staging.bytes, expected.bytes)


def test_a_slot_that_was_saved_again_has_only_its_new_block() -> None:
    kv = kv_of(layers_on_host())
    pool = pool_of(kv)
    pool.save([5, 0], [4, 1], NAMES[:2])
    pool.save([2], [4], NAMES[2:])
    # By the name of the first block in this slot.
    assert pool.load([4, 1], [7, 6], NAMES[:2]) == [7]
    assert pool.load([4], [7], NAMES[2:]) == []
    assert pool.corrupt_blocks == 1
