"""Checks and environment for engines with several ranks, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch
from vllm.platforms import current_platform

from worker_agent.engine.errors import EngineSettingError
from worker_agent.ranks.orphan import WORKER_PID

# Settings of vLLM that workers do not support, and what to do instead.
_ALONE: Final = {
    "data_parallel_size": "start one worker for each data-parallel rank, each with its own devices",
    "nnodes": "a worker's ranks are on one machine",
}
_BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
_THREADS: Final = "OMP_NUM_THREADS"


def prepare_ranks(arguments: Mapping[str, object]) -> int:
    """Return the number of ranks that vLLM's engine arguments imply, and prepare the environment for them.

    Raises EngineSettingError, naming the setting, for unsupported values.
    """
    for name, instead in _ALONE.items():
        if arguments.get(name, 1) != 1:
            raise EngineSettingError(f"{name} {arguments[name]}: {instead}")
    tensor, stages = _size(arguments, "tensor_parallel_size"), _size(arguments, "pipeline_parallel_size")
    ranks = tensor * stages
    if ranks == 1:
        return 1
    # This process has threads, and a lock that one holds during a fork would never be released in the child.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[WORKER_PID] = str(os.getpid())
    if current_platform.is_cpu():
        # By default, vLLM binds each rank to its own NUMA node.
        os.environ.setdefault(_BINDING, "nobind")
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    elif (devices := torch.accelerator.device_count()) < ranks:
        wanted = f"tensor_parallel_size {tensor} x pipeline_parallel_size {stages}"
        raise EngineSettingError(f"{wanted} needs {ranks} devices; this process sees {devices}")
    return ranks


def _size(arguments: Mapping[str, object], name: str) -> int:
    size = arguments.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise EngineSettingError(f"{name} {size!r}: a number of devices expected")
    return size
