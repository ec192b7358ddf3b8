"""Checks and environment for engines with several ranks, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch
from vllm.platforms import current_platform

from worker_agent.engine.errors import EngineSettingError
from worker_agent.parallel.node_span import NodeSpan, parallel_size, read_span
from worker_agent.parallel.rank_orphan import WORKER_PID

# What the worker sets itself, and why it has to.
_OURS: Final = {
    "distributed_executor_backend": "the worker starts its ranks with vLLM's `mp` executor",
    "worker_extension_cls": "the worker has an extension of its own",
}
_BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
_THREADS: Final = "OMP_NUM_THREADS"


def prepare_ranks(arguments: Mapping[str, object]) -> int:
    """Return the number of ranks that vLLM's engine arguments imply, on all machines, and prepare the
    environment for those on this one.

    Raises EngineSettingError, naming the setting, for unsupported values.
    """
    for name, reason in _OURS.items():
        if arguments.get(name) is not None:
            raise EngineSettingError(f"{name} {arguments[name]}: cannot be set, {reason}")
    tensor = parallel_size(arguments, "tensor_parallel_size")
    stages = parallel_size(arguments, "pipeline_parallel_size")
    ranks = tensor * stages
    span = read_span(arguments)
    here = ranks if span is None else span.local_ranks
    if ranks == 1:
        return 1
    # This process has threads, and a lock that one holds during a fork would never be released in the child.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[WORKER_PID] = str(os.getpid())
    if current_platform.is_cpu():
        # By default, vLLM binds each rank to its own NUMA node.
        os.environ.setdefault(_BINDING, "nobind")
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // here)))
    _require_devices(f"tensor_parallel_size {tensor} x pipeline_parallel_size {stages}", here, span)
    return ranks


def _require_devices(wanted: str, ranks: int, span: NodeSpan | None) -> None:
    """Raise EngineSettingError if this machine cannot have so many ranks."""
    cpu = current_platform.is_cpu()
    devices = 1 if cpu else torch.accelerator.device_count()
    if span is not None and devices != ranks:
        # vLLM derives from its number of devices which ranks share a machine.
        wanted = f"{wanted} on {span.nodes} nodes needs exactly {ranks} devices on each"
    elif devices < ranks and not cpu:
        wanted = f"{wanted} needs {ranks} devices"
    else:
        return
    raise EngineSettingError(f"{wanted}; this process sees {devices}")
