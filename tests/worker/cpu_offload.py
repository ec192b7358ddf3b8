"""Block copies for vLLM's OffloadingConnector on a CPU. Everything else is vLLM's own.

vLLM copies blocks with GPU kernels. These copies are made when the connector queries the finished ones, a
step or more after their submission, or when it waits for them; with `held`, only when it waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


@dataclass
class Copies:
    """Counts of the copies in this process. `held`: make only the copies that are waited for."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    held: bool = False


COPIES = Copies()


@dataclass(frozen=True)
class Copy:
    """A pending copy: rows of each source tensor to rows of its target."""

    job: int
    sources: list[torch.Tensor]
    source_rows: torch.Tensor
    targets: list[torch.Tensor]
    target_rows: torch.Tensor

    def make(self) -> TransferResult:
        for source, target in zip(self.sources, self.targets, strict=True):
            target[self.target_rows] = source[self.source_rows]
        return TransferResult(self.job, success=True)


@dataclass
class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one group to and from host memory."""

    device: list[torch.Tensor]
    host: list[torch.Tensor]
    waiting: list[Copy] = field(default_factory=list)
    made: list[TransferResult] = field(default_factory=list)

    def submit_store(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        rows, slots = torch.from_numpy(src_spec.block_ids), torch.from_numpy(dst_spec.block_ids)
        self.waiting.append(Copy(job_id, self.device, rows.long(), self.host, slots.long()))
        COPIES.stored_blocks += len(rows)
        return True

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        slots, rows = torch.from_numpy(src_spec.block_ids), torch.from_numpy(dst_spec.block_ids)
        self.waiting.append(Copy(job_id, self.host, slots.long(), self.device, rows.long()))
        COPIES.loaded_blocks += len(rows)
        return True

    def get_finished(self) -> list[TransferResult]:
        if not COPIES.held:
            self._make({copy.job for copy in self.waiting})
        made, self.made = self.made, []
        return made

    def wait(self, job_ids: set[int]) -> None:
        self._make(job_ids)

    def _make(self, jobs: set[int]) -> None:
        self.made += [copy.make() for copy in self.waiting if copy.job in jobs]
        self.waiting = [copy for copy in self.waiting if copy.job not in jobs]


class CopyingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Offloading spec to be named in `spec_name`, with this module as `spec_module_path`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert len(kv_caches.group_data_refs) == 1 and self.blocks_per_chunk == 1
        device = [each.tensor for each in kv_caches.tensors]
        host = [torch.empty(self.num_chunks, each.shape[1], dtype=each.dtype) for each in device]
        return CopyingWorker(device, host)
