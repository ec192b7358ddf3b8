"""Access to the KV, request states and hidden states of vLLM's worker, added by `worker_extension_cls`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group

from worker_agent.engine.vllm.connector import TailraceConnector, tailrace_connector
from worker_agent.engine.vllm.hidden_states import (
    BatchRows,
    HiddenStateTap,
    StepStates,
    rows_of_v1,
    rows_of_v2,
)
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.rank_facts import RankFacts, hardware
from worker_agent.engine.vllm.request_states import Adoption, RequestStates, Rewind
from worker_agent.parallel.rank_leftovers import OrphanWatch

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from worker_agent.parallel.rank_agent import RankMemory
    from worker_agent.parallel.rank_messages import Address

# vLLM imports this module in each rank before the rendezvous, and calls it only after all ranks are ready.
_ORPHAN_WATCH = OrphanWatch()


class RunnerExtension:
    """Methods for `collective_rpc`. Their names start with tailrace_, as they are added to vLLM's class."""

    if TYPE_CHECKING:
        use_v2_model_runner: bool
        model_runner: Any
        rank: int
        distributed_init_method: str
        parallel_config: ParallelConfig
        tailrace_memory: RankMemory

    def tailrace_connector(self) -> TailraceConnector:
        """Return the worker side of the KV connector, which has the KV tensors."""
        return tailrace_connector(get_kv_transfer_group())

    def tailrace_facts(self) -> RankFacts:
        """Return facts about this rank."""
        connector, blocks = self.tailrace_connector(), self._tailrace_blocks()
        return RankFacts(
            rank=self.rank,
            process=os.getpid(),
            device_type=blocks.device.type,
            hardware=hardware(blocks.device),
            num_layers=blocks.num_layers,
            layer_block_bytes=blocks.layer_block_bytes,
            layout_name=connector.layout_name,
            checksum_name=blocks.checksum_name,
            meeting=self._tailrace_meeting(),
            live_reason=connector.live_reason,
        )

    def tailrace_serve(self, address: Address) -> None:
        """Transfer this rank's part of the KV on behalf of the worker at this address; for engines with
        several ranks. A rank on another node than the worker transfers none."""
        self._tailrace_stage_input()
        if self.parallel_config.node_rank:
            # Its parent, which follows the worker, goes on being watched.
            return
        # Imported here because it loads UCX into the process.
        from worker_agent.parallel.rank_agent import start_agent

        self.tailrace_memory = start_agent(
            self.rank, self._tailrace_blocks(), self._tailrace_meeting(), address
        )
        _ORPHAN_WATCH.stop()

    def tailrace_settle(self, request_id: str, block_ids: Sequence[int]) -> None:
        """RankMemory.settle."""
        self.tailrace_memory.settle(request_id, block_ids)

    def tailrace_zero(self, block_ids: Sequence[int]) -> None:
        """Fill these blocks with zeros."""
        self._tailrace_blocks().zero(block_ids)

    def tailrace_tap(self, take: Callable[[StepStates], None]) -> HiddenStateTap:
        """Call `take` with the hidden states of observed steps."""
        runner = self.model_runner
        rows: BatchRows = rows_of_v2(runner) if self.use_v2_model_runner else rows_of_v1(runner)
        return HiddenStateTap(runner.get_model(), rows, take)

    def tailrace_adopt(self, adoption: Adoption) -> None:
        """RequestStates.adopt; this and the next three for Model Runner V1 only."""
        self._tailrace_states().adopt(adoption)

    def tailrace_forget(self, request_id: str) -> None:
        """RequestStates.forget."""
        self._tailrace_states().forget(request_id)

    def tailrace_rewind(self, rewind: Rewind) -> None:
        """RequestStates.rewind."""
        self._tailrace_states().rewind(rewind)

    def tailrace_generator_state(self, request_id: str) -> bytes:
        """RequestStates.generator_state."""
        return self._tailrace_states().generator_state(request_id)

    def _tailrace_blocks(self) -> KvBlocks:
        blocks = self.tailrace_connector().blocks
        assert blocks is not None
        return blocks

    def _tailrace_meeting(self) -> str:
        return os.path.basename(self.distributed_init_method)

    def _tailrace_stage_input(self) -> None:
        """Allocate the buffers in which a later pipeline stage receives its input. Model Runner V1 does so in
        its warm-up, which vLLM skips on a CPU if the size of the KV cache is configured."""
        runner = self.model_runner
        if (
            self.use_v2_model_runner
            or get_pp_group().is_first_rank
            or runner.intermediate_tensors is not None
        ):
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def _tailrace_states(self) -> RequestStates:
        return RequestStates(self.model_runner)
