"""A data-parallel rank of a mixture of experts: its settings, the meeting with the other ranks of the
deployment, and steps in lockstep with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeGuard

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group
from vllm.version import __version__ as vllm_version

from tailrace.model_identity import ORIGIN
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.vllm.internals import require_data_parallel
from worker_agent.parallel.data_parallel_meeting import Meeting, MeetingError, RankPeers, Rendezvous, meet

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


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


# Waves: the periods in which all ranks of a data-parallel deployment step together.
#
# In a mixture of experts with data parallelism, each forward pass has collectives across all ranks, so a rank
# without work runs a dummy batch. The protocol is that of vLLM's `DPEngineCoreProc` and its coordinator: the
# ranks compare after the first step of a wave, and after every `interval` steps, whether any has work left.
# If none has, the wave ends on all of them at the same step, and they block. Work that arrives at an idle
# rank starts the next wave, and the rank calls the others.


class Waves:
    """One rank's state in the protocol. Pure: the caller steps, compares, and passes the calls on.

    Waves are numbered from 0 on all ranks alike, because every rank takes part in every wave.
    """

    def __init__(self, interval: int) -> None:
        """`interval`: steps between two comparisons, the same on all ranks."""
        self._interval = interval
        # Of the wave in progress, or of the next one.
        self._number = 0
        self._running = False
        self._steps = 0

    @property
    def number(self) -> int:
        """Number of the wave in progress, or of the next one."""
        return self._number

    @property
    def running(self) -> bool:
        """Whether this rank has to step, with or without work."""
        return self._running

    @property
    def steps(self) -> int:
        """Steps of the wave so far; the same on all ranks between two steps, and 0 if none is in progress."""
        return self._steps

    def start(self) -> int:
        """Start the next wave, for work that has arrived; return its number, to be sent to all peers.

        Raise RuntimeError if a wave is in progress.
        """
        if self._running:
            raise RuntimeError(f"wave {self._number} is in progress")
        self._running = True
        return self._number

    def call(self, number: int) -> None:
        """Take part in a wave that a peer has started.

        A call of a wave that is in progress or has ended is ignored: several ranks may start the same one,
        and their calls may arrive late. Calls are read between steps, so none is early: no rank leaves a wave
        before this one has compared for the last time. Raise RuntimeError if one is.
        """
        if number > self._number:
            raise RuntimeError(f"called to wave {number}, but the next one is {self._number}")
        if number == self._number:
            self._running = True

    def step(self) -> bool:
        """Count a step, with work or without; return whether the ranks compare their work after it."""
        self._steps += 1
        # After the first step too, as vLLM does: a single request that ends at once needs no more.
        return self._steps == 1 or self._steps % self._interval == 0

    def compare(self, unfinished: bool) -> None:
        """Take the result of a comparison, `unfinished` if any rank has work left; else the wave ends."""
        if unfinished:
            return
        self._number += 1
        self._steps = 0
        self._running = False


# The first error of a lost rank may come from a collective; its link tells a moment later which one it is.
_LOSS_NOTICE_S = 2.0


class Lockstep:
    """vLLM's protocol (`DPEngineCoreProc.run_busy_loop`) around each step. Engine thread only, except where
    stated otherwise.

    Every forward pass belongs to a wave, in which each rank runs as many: `begin`, vLLM's step, `end`. Steps
    without a forward pass (results of an earlier one, news for the model runner) need no wave.
    """

    def __init__(
        self,
        config: VllmConfig,
        post: Callable[[Callable[[], None]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Meet the other ranks; blocks. Raise EngineSettingError if they do not meet.

        `post` runs a command on the engine thread, `on_lost` is called on another thread: see Peers.
        """
        parallel = config.parallel_config
        self._waves = Waves(parallel.dp_sync_interval)
        self._prefill_interval: int = config.scheduler_config.prefill_schedule_interval
        self.peers = meet_peers(config, lambda wave: post(lambda: self._waves.call(wave)), on_lost)
        # Of its own, between the engines' processes, before the model runners form theirs: vLLM's order.
        self._group = parallel.stateless_init_dp_group()

    @property
    def running(self) -> bool:
        """Whether this rank has to step, with or without work."""
        return self._waves.running

    @property
    def throttles_prefills(self) -> bool:
        """Whether the next step begins no prompt (vLLM's `prefill_schedule_interval`)."""
        return self._prefill_interval > 1 and self._waves.steps % self._prefill_interval != 0

    def begin(self, core: EngineCore) -> None:
        """Prepare a step: if there is work and no wave, start one on all ranks."""
        if not self._waves.running and core.scheduler.has_unfinished_requests():
            self.peers.start(self._waves.start())

    def end(self, core: EngineCore, executed: bool) -> bool:
        """Complete a step, after its outputs are delivered; return whether this rank ran a forward pass.

        `executed`: whether the step ran one. If not, and a wave is in progress, the others expect a dummy.
        """
        if not self._waves.running:
            return executed
        if not executed:
            core.execute_dummy_batch()
        if self._waves.step():
            unfinished = core.scheduler.has_unfinished_requests()
            self._waves.compare(ParallelConfig.has_unfinished_dp(self._group, unfinished))
        return True

    def lost_peer(self) -> str:
        """Return which rank is lost, for a step that failed; empty if none. Any thread; blocks for 2 s."""
        return self.peers.lost_within(_LOSS_NOTICE_S)

    def close(self, how: str) -> None:
        """Tell the others that this rank `how` (`was stopped`), which ends the deployment. Any thread."""
        self.peers.leave(how)

    def free(self) -> None:
        """Free the process group, after `close`."""
        stateless_destroy_torch_distributed_process_group(self._group)
