"""A device without memory for a staging copy costs cache entries and swaps, not blocks or the engine."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.host_pool import HostLoads, HostPool, HostTier, Load, Swap, SwapMetadata
from worker_agent.engine.vllm.imports import VllmImports
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.pinned import Fetches

pytestmark = pytest.mark.vllm

BLOCKS = 16
BLOCK = 4


class Memory:
    """The memory of an engine whose device may have none for a copy."""

    def __init__(self) -> None:
        self.kv = KvBlocks([torch.randn(BLOCKS, 2, 8, BLOCK).transpose(2, 3)], BLOCKS)
        self._staging = self.kv.staging
        self.pool = HostPool(self.kv, 8 * self.kv.layer_block_bytes)
        self.ledger = HostLedger(self.pool.slots, self.pool.block_bytes)
        self.tier = HostTier(self.ledger, self.kv, self.pool, BLOCK)
        self.blocks = BlockPool(BLOCKS, True, BLOCK, metrics_collector=self.tier)
        for block in self.blocks.blocks[1:]:
            name = make_block_hash_with_group_id(BlockHash(bytes([block.block_id]) * 32), 0)
            block.set_block_hash(name, BLOCK)
            self.blocks.cached_block_hash_to_block.insert(name, block)
        self.core = Mock(spec=LoadedCore, block_pool=self.blocks, host=self.ledger)
        self.core.promised_blocks, self.core.block_tokens = 0, BLOCK
        self.core._saving_evictions = self.tier.saving_evictions
        self.core.allocate_blocks = lambda blocks: LoadedCore.allocate_blocks(self.core, blocks)
        self.fetches = Fetches(self.core, lambda command: command())
        cached = [self.blocks.blocks[15]]
        self.fetches._look_up = Mock(return_value=("request", cached, [b"x" * 32] * 4))  # type: ignore[method-assign]

    def exhaust(self, error: Exception) -> None:
        self.kv.staging = Mock(side_effect=error)  # type: ignore[method-assign]

    def relieve(self) -> None:
        self.kv.staging = self._staging  # type: ignore[method-assign]


@pytest.fixture
def memory() -> Memory:
    return Memory()


NO_MEMORY = EngineRefusal("the device has no memory for a transfer")


def test_a_fetch_goes_on_without_saving_what_it_evicts(memory: Memory) -> None:
    memory.exhaust(NO_MEMORY)
    free = memory.blocks.get_num_free_blocks()
    memory.fetches.open("fetch", Mock(), 16)
    assert memory.ledger.cached == memory.ledger.used == 0
    memory.fetches.drop("fetch")
    assert memory.blocks.get_num_free_blocks() == free


def test_a_fetch_that_fails_leaves_no_block_in_use(memory: Memory) -> None:
    memory.exhaust(RuntimeError("the device has failed"))
    free = memory.blocks.get_num_free_blocks()
    with pytest.raises(RuntimeError):
        memory.fetches.open("fetch", Mock(), 16)
    assert memory.blocks.get_num_free_blocks() == free
    assert not any(block.ref_cnt for block in memory.blocks.blocks[1:])


@pytest.mark.parametrize("error", [NO_MEMORY, RuntimeError("the device has failed")])
def test_an_import_whose_reservation_fails_frees_it(error: Exception) -> None:
    core = Mock(spec=LoadedCore, scheduler=Mock(), layout=Mock(), kv_manager=Mock(), block_pool=Mock())
    core.kv_manager.pop_blocks_for_free.return_value = []
    core.reserve.side_effect = core.reserve_for.side_effect = error
    imports = VllmImports(core, Mock(), lambda command: None)
    with pytest.raises(type(error)):
        imports._reserve_blocks(Mock(), 1, 1, [])
    core.block_pool.free_blocks.assert_called_once()


def test_a_swap_that_cannot_be_copied_is_recomputed(memory: Memory) -> None:
    connector = TailraceConnector.__new__(TailraceConnector)
    connector.blocks, connector.pool, connector.ledger = memory.kv, memory.pool, memory.ledger
    slot = memory.ledger.cache(b"evicted")
    swapped = memory.ledger.swap_out("request", BLOCK, [b"swapped"])
    assert slot is not None and swapped is not None
    swaps = [Swap([1], [slot], [b"evicted"]), Swap([2], swapped.slots, swapped.names)]
    memory.exhaust(NO_MEMORY)
    connector.handle_preemptions(SwapMetadata(swap_outs=swaps))
    assert memory.ledger.find([b"evicted"]) == []
    memory.relieve()
    # Reported to vLLM, which recomputes what could not be loaded.
    assert memory.pool.load(swapped.slots, [3], swapped.names) == [3]
    assert memory.pool.corrupt_blocks == 0


def test_a_prefix_that_cannot_be_loaded_is_recomputed(memory: Memory) -> None:
    assert memory.pool.save([1, 2], [4, 5], [b"a", b"b"])
    memory.exhaust(NO_MEMORY)
    loads = HostLoads(memory.pool)
    loads.start(Load("request", Swap([6, 7], [4, 5], [b"a", b"b"])))
    # Waits for the load.
    loads.close()
    assert loads.pop_completed() == {"request": [6, 7]}
