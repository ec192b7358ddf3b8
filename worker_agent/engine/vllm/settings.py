"""Convert the options of a vLLM engine to vLLM's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tailrace.json_value import JsonValue
from tailrace.model_folder import ModelFolderError, require_model
from tailrace.wire.setting_errors import one_line
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.vllm.connector import transfer_config
from worker_agent.engine.vllm.internals import require_multi, require_runner_v2
from worker_agent.engine.vllm.lockstep import check_data_parallel
from worker_agent.parallel.node_span import NodeSpan, parallel_size, read_span
from worker_agent.parallel.rank_leftovers import WORKER_PID
from worker_agent.settings import EngineOptions

# On CPUs, where the line says nothing else: the smallest block that the attention kernel handles well, and a
# KV cache that suits a small machine.
_CPU_BLOCK_TOKENS = 32
_CPU_KV_BYTES = 1 << 30

# Read by vLLM at import or at start. The engine core must live in this process.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def vllm_config(options: EngineOptions) -> VllmConfig:
    """Return vLLM's configuration. Raises EngineSettingError for settings that it does not accept, or
    RuntimeError, saying what to change, for unsupported ones."""
    try:
        require_model(options.model)
    except ModelFolderError as error:
        raise EngineSettingError(f"--model: {error}") from error
    _require_known(options.arguments)
    os.environ.update(_ENVIRONMENT)
    arguments: dict[str, object] = {
        "model": options.model,
        # Several front ends share the engine and send every image in full, so no cache can be assumed.
        "mm_processor_cache_gb": 0,
        "num_gpu_blocks_override": options.kv_blocks,
    }
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
        arguments["block_size"] = _CPU_BLOCK_TOKENS
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = _CPU_KV_BYTES
    arguments |= options.arguments
    if arguments.get("distributed_executor_backend") == "mp":
        del arguments["distributed_executor_backend"]  # what it is anyway
    check_data_parallel(arguments)
    ranks = prepare_ranks(arguments)
    try:
        transfer = transfer_config(arguments)
        config = EngineArgs(
            **arguments,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            worker_extension_cls="worker_agent.engine.vllm.runner_extension.RunnerExtension",
            kv_transfer_config=transfer,
        ).create_engine_config()
    except (TypeError, ValueError, OSError) as error:
        raise EngineSettingError(f"vLLM rejects these engine arguments: {one_line(error)}") from error
    if config.use_v2_model_runner:
        require_runner_v2()
    if config.kv_transfer_config.kv_connector == "MultiConnector":
        require_multi()
    _choose_scheduler(config, forced=arguments.get("async_scheduling") is True)
    return config


def _choose_scheduler(config: VllmConfig, forced: bool) -> None:
    """Select our scheduler for vLLM's synchronous or async one, depending on the configuration."""
    if forced:
        # vLLM disables it on CPUs, where it gains nothing but works.
        config.scheduler_config.async_scheduling = True
    name = "AsyncPausingScheduler" if config.scheduler_config.async_scheduling else "PausingScheduler"
    config.scheduler_config.scheduler_cls = f"worker_agent.engine.vllm.scheduler.{name}"


def _require_known(engine_args: Mapping[str, JsonValue]) -> None:
    """Raise EngineSettingError for arguments that vLLM does not have."""
    unknown = sorted(engine_args.keys() - {each.name for each in fields(EngineArgs)})
    if unknown:
        raise EngineSettingError(f"vLLM has no engine argument {', '.join(unknown)}")


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
