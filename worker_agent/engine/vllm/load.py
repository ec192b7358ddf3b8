"""A loaded vLLM EngineCore with the operations on its internals that live migration needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from tailrace.handover import TransferMode, by_replay
from tailrace.intra.base import IntraPolicy
from tailrace.wire.setting_errors import one_line
from worker_agent.engine.base import Frames
from worker_agent.engine.errors import EngineRefusal, EngineSettingError, NoRoom, Unrunnable
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.adapters import Adapters
from worker_agent.engine.vllm.connector import TailraceConnector, handover_of
from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates
from worker_agent.engine.vllm.host_pool import HostLoads, HostPool, HostSlot, HostTier, default_host_bytes
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.layouts import BlockPosition, Layout
from worker_agent.engine.vllm.lockstep import Lockstep
from worker_agent.engine.vllm.phases import ReasoningMarks, load_marks
from worker_agent.engine.vllm.rank_facts import RankFacts
from worker_agent.engine.vllm.request_states import Adoption, Rewind
from worker_agent.engine.vllm.requests import Grammars
from worker_agent.engine.vllm.sampling_bounds import sampling_problem
from worker_agent.engine.vllm.scheduler import PausingScheduler

if TYPE_CHECKING:
    from worker_agent.parallel.rank_messages import Address

# Far more than the number of batches that vLLM ever has in flight.
_MAX_DRAIN_STEPS = 64
# Deadline for copies of one request's KV from or to host memory, and the polling interval.
_COPY_DEADLINE_S = 5.0
_COPY_POLL_S = 0.001


class InProcessCore(EngineCore):  # type: ignore[misc]
    """EngineCore with what its process variants add for vLLM's ready response and for data-parallel ranks."""

    frontend_stats_publish_address = None
    engine_index = 0

    def __init__(self, config: VllmConfig, lockstep: Lockstep | None) -> None:
        self.lockstep = lockstep
        super().__init__(config, Executor.get_class(config), log_stats=False)

    def _should_throttle_prefills(self) -> bool:
        return self.lockstep is not None and self.lockstep.throttles_prefills


class LoadedCore:
    """A running engine core. Engine thread only, except for attributes that never change."""

    scheduler: PausingScheduler
    kv_manager: KVCacheManager
    block_pool: BlockPool
    # In rank order; with one entry, the KV is in this process.
    ranks: list[RankFacts]
    marks: ReasoningMarks | None

    def __init__(
        self, config: VllmConfig, host_kv_bytes: int | None, lockstep: Lockstep | None = None
    ) -> None:
        """Load the model; takes seconds to minutes.

        `host_kv_bytes`: host memory for KV; None: `default_host_bytes`, which a CPU engine uses for preempted
        requests only. `lockstep`: with other data-parallel ranks, which load at the same time.
        """
        # Block hashes identify KV across workers, so their chains must all start from the same seed.
        os.environ.setdefault("PYTHONHASHSEED", "0")
        self.config = config
        self.lockstep = lockstep
        self.handover = handover_of(config)
        # Requests to a pooling model have a single output.
        self.pooling: bool = config.model_config.runner_type != "generate"
        try:
            self.core = InProcessCore(config, lockstep)
        except (ValueError, OSError) as error:
            # Found only with the model at hand: no room for the KV of one request, missing files, ...
            raise EngineSettingError(one_line(error)) from error
        self.adapters = Adapters(config, self.core)
        self.scheduler = self.core.scheduler
        self.kv_manager = self.scheduler.kv_cache_manager
        self.block_pool = self.kv_manager.block_pool
        self.ranks = self._rpc_all("tailrace_facts")
        self.layout = Layout(self.scheduler.kv_cache_config, self.kv_manager)
        self.block_tokens: int = self.layout.block_tokens
        reason = next((each.live_reason for each in self.ranks if each.live_reason), "")
        if reason and self.handover.mode is TransferMode.LIVE:
            self.handover = by_replay(reason)
        self._kv: KvBlocks | None = None
        self.host_pool: HostPool | None = None
        self.host = HostLedger(0, 0)
        connector: object = None
        if not self.ranked:
            connector = self._rpc("tailrace_connector")
            assert isinstance(connector, TailraceConnector)
            assert connector.blocks is not None
            self._kv = connector.blocks
            # Another connector may store the KV of preempted requests; then both would load it.
            swaps = self.layout.plain and not self.scheduler.other_connectors
            host_bytes = default_host_bytes() if host_kv_bytes is None else host_kv_bytes
            pool = HostPool(self._kv, host_bytes if swaps else 0)
            self.host = HostLedger(pool.slots, pool.block_bytes)
            connector.pool = self.host_pool = pool
            connector.ledger = self.host
        self.scheduler.tailrace_connector.ledger = self.host
        # Why evicted prefixes are not cached in host memory; empty if they are.
        self.no_host_tier_reason = self._no_host_tier_reason(host_kv_bytes is not None)
        if not self.no_host_tier_reason:
            assert isinstance(connector, TailraceConnector) and self.host_pool is not None
            tier = HostTier(self.host, self.kv, self.host_pool, self.block_tokens)
            self.block_pool.metrics_collector = self.scheduler.tailrace_connector.tier = tier
            connector.loads = HostLoads(self.host_pool)
        # The policy that orders the requests, or None for vLLM's own order.
        self.intra: IntraPolicy | None = None
        self.marks = load_marks(config)
        self.grammars = Grammars()
        self.max_model_len: int = config.model_config.max_model_len
        # Blocks of the longest request.
        self.max_blocks: int = cdiv(self.max_model_len, self.block_tokens)
        self.kv_blocks_total: int = config.cache_config.num_gpu_blocks - 1
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        # Run one engine step and deliver its outputs; set by the owner of the loop.
        self.step_now: Callable[[], None] = _no_loop

    @property
    def ranked(self) -> bool:
        """Whether the engine has several ranks, each with its part of the KV in its own process."""
        return len(self.ranks) > 1

    @property
    def nodes(self) -> int:
        """Number of machines that the ranks are on."""
        return int(self.config.parallel_config.nnodes)

    @property
    def local_ranks(self) -> list[RankFacts]:
        """The ranks on this machine."""
        return self.ranks[: len(self.ranks) // self.nodes]

    @property
    def kv(self) -> KvBlocks:
        """The KV of an engine with one rank. Any thread. Raises EngineRefusal if it has several."""
        if self._kv is None:
            raise EngineRefusal("its KV is in the ranks' processes")
        return self._kv

    @property
    def kv_blocks_used(self) -> int:
        """Blocks in use; blocks that only the prefix cache holds count as free. Any thread."""
        return self.kv_blocks_total - int(self.block_pool.get_num_free_blocks())

    def _no_host_tier_reason(self, host_bytes_configured: bool) -> str:
        if self.ranked:
            return "several ranks"
        if self.handover.mode is not TransferMode.LIVE:
            return self.handover.reason
        if not self.layout.plain:
            return "several KV cache groups, or none with full attention"
        if self.scheduler.other_connectors:
            return "other KV connectors"
        if not self.finds_by_name:
            return "no prefix caching, or blocks that are not hashed individually"
        if not self.host.total:
            return "no host memory for KV"
        if not host_bytes_configured and self.kv.device.type == "cpu":
            # Each copy would take time from a step, to move KV within the same memory.
            return "the KV cache of a CPU engine is host memory itself (--host-kv-bytes turns it on)"
        return ""

    # ---- steps

    @property
    def busy(self) -> bool:
        """Whether to step: for this engine's own work, or for that of other data-parallel ranks."""
        return self.has_work or (self.lockstep is not None and self.lockstep.running)

    @property
    def has_work(self) -> bool:
        """Whether there is a step to begin or a step in flight to complete."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def drain(self, request_id: str) -> None:
        """Step until nothing refers to an earlier request with this ID: no step in flight, no pending message
        to the model runner and no connector's work. Raises EngineRefusal after 5 s."""
        for _ in range(_MAX_DRAIN_STEPS):
            if not self._in_flight(request_id) and request_id not in self.scheduler.finished_req_ids:
                break
            self.step_now()
        else:
            raise RuntimeError(f"steps of request {request_id} did not end")
        connectors = self.scheduler.other_connectors
        if connectors:
            self._step_while(
                lambda: connectors.has_work(request_id) or request_id in self.scheduler.requests,
                f"another KV connector does not end its work for request {request_id}",
            )
        self.drain_load(request_id)

    def drain_load(self, request_id: str) -> None:
        """Step until no load from host memory is in progress for an earlier request with this ID. Raises
        EngineRefusal after 5 s."""
        tier = self.scheduler.tailrace_connector.tier
        if tier is not None and tier.is_loading(request_id):
            self._step_while(
                lambda: tier.is_loading(request_id),
                f"KV of request {request_id} does not come from host memory",
            )

    def _step_while(self, condition: Callable[[], bool], reason: str) -> None:
        """Step while the condition holds. Raises EngineRefusal with the reason at the deadline."""
        deadline_s = time.monotonic() + _COPY_DEADLINE_S
        while condition():
            if time.monotonic() > deadline_s:
                raise EngineRefusal(reason)
            self.step_now()
            time.sleep(_COPY_POLL_S)

    def _in_flight(self, request_id: str) -> bool:
        batches = self.core.batch_queue or ()
        return any(request_id in scheduled.num_scheduled_tokens for _, scheduled, _ in batches)

    # ---- requests

    def decode(self, frames: Frames, client: int, adapter_version: str = "") -> Request:
        """Decode vLLM's message into its Request. Raises Unrunnable for requests that no engine of this model
        can run, EngineRefusal for those that this one cannot, for example with another version of an
        adapter."""
        try:
            message: EngineCoreRequest = self._decoder.decode(frames)
        except (ValueError, TypeError, LookupError) as error:
            raise Unrunnable(f"malformed request: {error}") from error
        if (message.sampling_params is None) != self.pooling:
            runner = self.config.model_config.runner_type
            raise Unrunnable(f"what a {runner!r} runner (runner) does not do")
        if message.prompt_token_ids is None or message.resumable:
            raise Unrunnable("only complete prompts of token IDs are supported")
        prompt = message.prompt_token_ids
        if not prompt or len(prompt) >= self.max_model_len + self.pooling:
            raise Unrunnable(f"a prompt of {len(prompt)} tokens with max_model_len {self.max_model_len}")
        if not message.mm_features and not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise Unrunnable(f"a token id outside the vocabulary of {self._vocab_size}")
        params = message.sampling_params
        if params is not None and (problem := sampling_problem(params, self.config.use_v2_model_runner)):
            raise Unrunnable(problem)
        if self.core.mm_receiver_cache is not None and message.mm_features:
            message.mm_features = self.core.mm_receiver_cache.get_and_update_features(message.mm_features)
        if message.lora_request is not None:
            message.lora_request = self.adapters.of_request(message.lora_request, adapter_version)
        message.client_index = client
        return Request.from_engine_core_request(message, self.core.request_block_hasher)

    def start_grammar(self, request: Request) -> None:
        """Start to compile the request's grammar, if it has one."""
        if request.use_structured_output:
            self.core.structured_output_manager.grammar_init(request)

    def append_outputs(self, request: Request, output_token_ids: Sequence[int]) -> None:
        """Append tokens generated elsewhere and advance the grammar, which must be ready, over them.

        vLLM's own check finds the end of reasoning, where a grammar begins to apply. Raises EngineRefusal if
        the tokens do not match the grammar.
        """
        request.prefill_stats = None
        if not request.use_structured_output:
            request.append_output_token_ids(list(output_token_ids))
            return
        for token_id in output_token_ids:
            request.append_output_token_ids(token_id)
            if not self.core.structured_output_manager.accept_tokens(request, [token_id]):
                raise EngineRefusal("the output so far does not follow the request's grammar")

    @property
    def keeps_states(self) -> bool:
        """Whether the model runner keeps states of requests, and generators of seeded ones (V1, not V2)."""
        return not self.config.use_v2_model_runner

    def adopt(self, request: Request, generator_state: bytes) -> None:
        """Register the request with the model runner, so that it can enter the scheduler like a preempted
        one."""
        self.drain(request.request_id)
        if self.keeps_states:
            try:
                self._rpc("tailrace_adopt", Adoption.of(request, generator_state))
            except Exception:
                # For one, the state is that of another kind of generator. The runner may know the request.
                self._rpc("tailrace_forget", request.request_id)
                raise
        self.scheduler.adopted.add(request.request_id)

    def forget(self, request_id: str) -> None:
        """Undo `adopt` for a request that was not added to the scheduler."""
        self.scheduler.adopted.discard(request_id)
        if self.keeps_states:
            self._rpc("tailrace_forget", request_id)

    def generator_state(self, request_id: str) -> bytes:
        """Return the state of the request's own generator; empty if it has none."""
        if not self.keeps_states:
            return b""
        # All ranks of the last pipeline stage sample identically.
        state = self._rpc_all("tailrace_generator_state", request_id)[-1]
        assert isinstance(state, bytes)
        return state

    def tap(self, take: Callable[[StepStates], None]) -> HiddenStateTap:
        """Call `take` with hidden states. Raises RuntimeError if this model's cannot be observed."""
        tap = self._rpc("tailrace_tap", take)
        assert isinstance(tap, HiddenStateTap)
        return tap

    def after_step(self) -> None:
        """Rewind the generators of requests whose KV was loaded corrupt, which vLLM does not do."""
        discarded, self.scheduler.discarded = self.scheduler.discarded, set()
        for request_id in discarded:
            request = self.scheduler.requests.get(request_id)
            if request is not None and self.keeps_states:
                self._rpc("tailrace_rewind", Rewind(request_id, request.num_output_tokens))

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests and free their blocks without an output; unknown requests are ignored."""
        self.core.abort_requests(list(request_ids))

    # ---- ranks in their own processes

    def serve_ranks(self, address: Address) -> None:
        """Have each rank connect to the worker at this address, to transfer its part of the KV."""
        self._rpc("tailrace_serve", address)

    def settle_ranks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Have the ranks write the blocks of an import that they have buffered, now that all its block IDs
        are known."""
        self._rpc("tailrace_settle", request_id, list(block_ids))

    # ---- blocks

    def blocks_of(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Return the request's blocks of the main group, in token order."""
        return self._groups_of(request_id)[self.layout.main or 0]

    def blocks_at(self, request_id: str, positions: Sequence[BlockPosition]) -> list[KVCacheBlock]:
        """Return the request's blocks at these positions."""
        groups = self._groups_of(request_id)
        return [groups[position.group][position.index] for position in positions]

    def block_name(self, request: Request, number: int) -> bytes:
        """Return the name of a full block of the main group, a hash of its tokens and all before them; empty
        if vLLM has none."""
        parts, rest = divmod(self.block_tokens, self.scheduler.hash_block_size)
        last = (number + 1) * parts - 1
        named = parts > 0 and not rest and last < len(request.block_hashes)
        return bytes(request.block_hashes[last]) if named else b""

    @property
    def finds_by_name(self) -> bool:
        """Whether the prefix cache indexes blocks of the main group by their `block_name`.

        False with another KV connector, which may name blocks before it has loaded them, and reads free
        blocks; and with ranks on several nodes, of which the worker reaches only its own.
        """
        named = bool(self.block_pool.enable_caching) and self.scheduler.hash_block_size == self.block_tokens
        return named and not self.scheduler.other_connectors and self.nodes == 1

    @property
    def promised_blocks(self) -> int:
        """Free blocks that partly computed prompts will still need."""
        return int(self.scheduler._inflight_prefill_reserved_blocks())

    def find_on_device(self, names: Sequence[bytes]) -> list[KVCacheBlock]:
        """Return the device's blocks with these names (see `block_name`), up to the first missing one.

        They may be evicted until they are pinned or part of a reservation.
        """
        main = self.layout.main
        # Blocks that a step in flight loads from host memory are named before they are verified.
        if main is None or not self.finds_by_name or self.scheduler.unverified:
            return []
        found: list[KVCacheBlock] = []
        for name in names:
            blocks = self.block_pool.get_cached_block(name, [main]) if name else None
            if blocks is None:
                break
            found += blocks
        return found

    def find_in_any_tier(self, names: Sequence[bytes]) -> list[KVCacheBlock | HostSlot]:
        """Return the blocks with these names, each on the device or else in host memory, up to the first
        missing one."""
        found: list[KVCacheBlock | HostSlot] = []
        while len(found) < len(names):
            rest = names[len(found) :]
            more = self.find_on_device(rest) or [HostSlot(slot) for slot in self.host.find(rest)]
            if not more:
                break
            found += more
        return found

    def pin(self, blocks: Sequence[KVCacheBlock | HostSlot]) -> None:
        """Add a user to each block."""
        self.block_pool.touch([block for block in blocks if not isinstance(block, HostSlot)])
        for block in blocks:
            if isinstance(block, HostSlot):
                self.host.pin(block.slot)

    def unpin(self, blocks: Sequence[KVCacheBlock | HostSlot]) -> None:
        """Remove a user from each block."""
        # Last block first, so that the prefix cache evicts it before the blocks it depends on.
        self.block_pool.free_blocks([block for block in reversed(blocks) if not isinstance(block, HostSlot)])
        self.host.release([block.slot for block in blocks if isinstance(block, HostSlot)])

    def allocate_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate free blocks, each with one user; the caller has checked that there are enough."""
        allocated: list[KVCacheBlock] = []
        try:
            with self._saving_evictions():
                allocated = self.block_pool.get_new_blocks(num_blocks)
        except Exception:
            self.block_pool.free_blocks(allocated)
            raise
        return allocated

    def reserve(self, request: Request, num_blocks: int, cached: Sequence[KVCacheBlock] = ()) -> bool:
        """Give the request at least this many blocks. Return False and change nothing if there is no room.

        `num_blocks` is at most max_blocks. `cached` are the request's first blocks, if it has none yet.
        Leaves the blocks that partly computed prompts will still need, as vLLM does for loads.
        """
        tokens = min(num_blocks * self.block_tokens, self.max_model_len)
        return self._allocate(request, tokens - len(cached) * self.block_tokens, 0, cached)

    def reserve_for(self, request: Request, computed: int, cached: Sequence[KVCacheBlock] = ()) -> bool:
        """Reserve blocks in every group for a request that arrives with `computed` tokens: those of these
        tokens, and one block more for the next ones. Otherwise like `reserve`."""
        more = min(self.block_tokens, self.max_model_len - computed)
        external = computed - len(cached) * self.block_tokens
        return self._allocate(request, max(1, more), external, cached)

    def extend(self, request: Request) -> bool:
        """Extend a reservation to the request's computed tokens and one more; False if there is no room."""
        return self._allocate(request, 1, 0)

    def _allocate(
        self, request: Request, tokens: int, external: int, cached: Sequence[KVCacheBlock] = ()
    ) -> bool:
        """Allocate through vLLM. `cached` are blocks of the main group for a request without blocks; vLLM
        adds a user to each, as for a prefix found in its cache."""
        groups = range(len(self.kv_manager.coordinator.single_type_managers))
        found = KVCacheBlocks(tuple(list(cached) if group == self.layout.main else [] for group in groups))
        with self._saving_evictions():
            allocated = self.kv_manager.allocate_slots(
                request,
                tokens,
                num_new_computed_tokens=len(cached) * self.block_tokens,
                new_computed_blocks=found if cached else None,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
                reserved_blocks=self.promised_blocks,
                has_scheduled_reqs=bool(self.scheduler.running),
            )
        if allocated is None:
            return False
        if self.scheduler.other_connectors.may_read(
            {each for ids in allocated.get_block_ids() for each in ids}
        ):
            raise NoRoom("no room: another KV connector is still reading the free KV blocks")
        if self.scheduler.needs_kv_cache_zeroing:
            # vLLM would do it in the next step, and could overwrite KV that was received by then.
            self._rpc("tailrace_zero", self.kv_manager.take_new_block_ids())
        return True

    def _saving_evictions(self) -> AbstractContextManager[None]:
        tier = self.scheduler.tailrace_connector.tier
        return nullcontext() if tier is None else tier.saving_evictions()

    def _groups_of(self, request_id: str) -> Sequence[Sequence[KVCacheBlock]]:
        groups: Sequence[Sequence[KVCacheBlock]] = self.kv_manager.get_blocks(request_id).blocks
        return groups

    def _rpc(self, method: str, *arguments: object) -> object:
        return self._rpc_all(method, *arguments)[0]

    def _rpc_all(self, method: str, *arguments: object) -> list[Any]:
        """Call a method in every rank, between two of its steps, and return the results in rank order."""
        results: list[Any] = self.core.collective_rpc(method, args=arguments)
        return results


def _no_loop() -> None:
    raise RuntimeError("this engine core has no loop")
