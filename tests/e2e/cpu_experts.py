"""What vLLM's CPU backend lacks for data-parallel ranks of a mixture of experts, as a plugin of vLLM.

vLLM 0.32 sends each token's hidden state to all ranks (`all_gatherv`) and adds up their experts' results
(`reduce_scatterv`). On a CPU, neither is implemented, and the kernel takes the numbers of all experts for
those of the rank's own. The collectives here are gloo's; everything else is vLLM's and ours.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist

_METADATA = "Metadata-Version: 2.1\nName: cpu-experts\nVersion: 1.0\n"
_ENTRY_POINTS = "[vllm.general_plugins]\ncpu_experts = tests.e2e.cpu_experts:install\n"


def write_plugin(folder: Path) -> str:
    """Write the plugin's metadata, by which vLLM finds it; return the folder to add to PYTHONPATH."""
    package = folder / "cpu_experts-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(_METADATA)
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    return str(folder)


def install() -> None:
    """Add what is missing. Called by vLLM in every process that runs a model, possibly more than once."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if CpuCommunicator.all_gatherv is all_gatherv:
        return
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    apply = CPUUnquantizedExperts.apply

    def apply_own(self: object, *args: object, **kwargs: object) -> None:
        """Compute the rank's own experts; the others' have the weight 0."""
        given = signature(apply).bind(self, *args, **kwargs).arguments
        if (numbers := given["expert_map"]) is not None:
            own = numbers[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"] * (own >= 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        apply(**given)

    CPUUnquantizedExperts.apply = apply_own


def all_gatherv(
    self: object, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Return all ranks' rows, of which there may be different numbers."""
    if isinstance(input_, list):
        return [torch.as_tensor(all_gatherv(self, each, dim, sizes)) for each in input_]
    rows = sizes or [len(input_)] * self.world_size  # type: ignore[attr-defined]
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.device_group)  # type: ignore[attr-defined]
    return torch.cat([part[:number] for part, number in zip(parts, rows, strict=True)])


def reduce_scatterv(
    self: object, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    size, rank = self.world_size, self.rank_in_group  # type: ignore[attr-defined]
    rows = sizes or [len(input_) // size] * size
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)  # type: ignore[attr-defined]
    first = sum(rows[:rank])
    return total[first : first + rows[rank]]
