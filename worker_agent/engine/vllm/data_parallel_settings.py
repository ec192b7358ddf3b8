"""Settings of data-parallel ranks: checks, and the meeting with the other ranks of the deployment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Final, TypeGuard

from vllm.config import ModelConfig, VllmConfig
from vllm.version import __version__ as vllm_version

from tailrace.model_identity import ORIGIN
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.vllm.internals import require_data_parallel
from worker_agent.parallel.data_parallel_meeting import Meeting, MeetingError, Rendezvous, meet
from worker_agent.parallel.data_parallel_peers import RankPeers

MEETING_DEADLINE_S: Final = 600.0
"""How long a rank waits for the others; they meet before they load the model."""

# Forms of data parallelism in which one vLLM process starts several ranks.
_OF_ONE_PROCESS: Final = (
    *("data_parallel_start_rank", "data_parallel_size_local", "data_parallel_hybrid_lb"),
    *("data_parallel_multi_port_external_lb", "enable_elastic_ep"),
)
# Settings of the parallel configuration that must be equal on all ranks.
_SHARED: Final = (
    *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
    *("all2all_backend", "enable_eplb", "dp_sync_interval"),
)


def check_data_parallel(arguments: Mapping[str, object]) -> None:
    """Raise EngineSettingError, naming the setting, unless vLLM's engine arguments make this engine one rank
    of a data-parallel deployment, or none."""
    size, rank = arguments.get("data_parallel_size", 1), arguments.get("data_parallel_rank")
    if not _is_number(size) or size < 1:
        raise EngineSettingError(f"data_parallel_size {size!r}: must be a number of ranks")
    if rank is not None and size == 1:
        raise EngineSettingError(f"data_parallel_rank {rank!r}: data_parallel_size says of how many ranks")
    if rank is not None and (not _is_number(rank) or not 0 <= rank < size):
        raise EngineSettingError(
            f"data_parallel_rank {rank!r}: with data_parallel_size {size}, ranks are 0 to {size - 1}"
        )
    for name in _OF_ONE_PROCESS:
        if arguments.get(name):
            raise EngineSettingError(
                f"{name} {arguments[name]}: each worker is one data-parallel rank (data_parallel_rank)"
            )
    if size == 1:
        return
    if rank is None:
        raise EngineSettingError(
            f"data_parallel_size {size}: each worker is one rank; data_parallel_rank says which"
        )
    if arguments.get("nnodes", 1) != 1:
        raise EngineSettingError(
            f"nnodes {arguments['nnodes']}: data-parallel ranks that span machines are not supported"
        )


def prepare_data_parallel(config: VllmConfig) -> bool:
    """Return whether the engine has to step together with other data-parallel ranks, and prepare `config` for
    that. Raise EngineSettingError if the model is dense, VllmLacks if vLLM has not all names for it."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return False
    require_data_parallel()
    if not config.model_config.is_moe:
        # vLLM 0.32 says so itself.
        raise EngineSettingError(
            f"data_parallel_size {parallel.data_parallel_size}: ranks of a dense model share nothing; start "
            "workers without data_parallel_* arguments"
        )
    # Each worker sees only its own devices.
    parallel.data_parallel_rank_local = 0
    return True


def meet_peers(
    config: VllmConfig, on_start: Callable[[int], None], on_lost: Callable[[str], None]
) -> RankPeers:
    """Wait until all ranks have come, and give `config` the ports of their process groups. Blocks.

    The callbacks are those of RankPeers. Raise EngineSettingError if the ranks do not meet.
    """
    parallel = config.parallel_config
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    rendezvous = Rendezvous(
        host=parallel.data_parallel_master_ip,
        port=parallel.data_parallel_rpc_port,
        rank=rank,
        size=size,
        settings={
            "vLLM": vllm_version.partition("+")[0],
            "model": _model(config.model_config),
            **{name: str(getattr(parallel, name)) for name in _SHARED},
        },
    )
    # vLLM's front end hands its own free ports to all ranks in the same way.
    offered = [parallel.data_parallel_master_port, *parallel._data_parallel_master_port_list]
    try:
        meeting: Meeting = meet(rendezvous, offered, MEETING_DEADLINE_S)
    except MeetingError as error:
        raise EngineSettingError(str(error)) from error
    parallel.data_parallel_master_port, *parallel._data_parallel_master_port_list = meeting.ports
    return RankPeers(rank, size, meeting, on_start, on_lost)


def _model(model: ModelConfig) -> str:
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in ORIGIN}
    facts = json.dumps([config, str(model.dtype), str(model.quantization)], sort_keys=True, default=str)
    return f"with configuration {hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()}"


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
