"""vLLM's EngineCore, loaded, with the handful of operations on its insides that live migration needs."""

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

from tailrace.handover import Way, by_replay
from tailrace.intra.base import IntraPolicy
from worker_agent.engine.base import Frames
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.adapters import Adapters
from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.grammars import Grammars
from worker_agent.engine.vllm.handover import handover_of
from worker_agent.engine.vllm.hidden_states import HiddenStateTap, StepStates
from worker_agent.engine.vllm.host_loads import HostLoads
from worker_agent.engine.vllm.host_pool import HostPool, HostSlot
from worker_agent.engine.vllm.host_tier import HostTier
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.layouts import Layout, Place
from worker_agent.engine.vllm.phases import ReasoningMarks, load_marks
from worker_agent.engine.vllm.rank_facts import RankFacts
from worker_agent.engine.vllm.request_states import Adoption, Rewind
from worker_agent.engine.vllm.scheduler import PausingScheduler

if TYPE_CHECKING:
    from worker_agent.ranks.messages import Address

# Far beyond any number of batches that vLLM has in flight.
_SETTLING_STEPS = 64
# For copies of one request's KV from or to host memory to end, and between two looks at them.
_COPIES_S = 5.0
_COPY_LOOK_S = 0.001


class InProcessCore(EngineCore):  # type: ignore[misc]
    """EngineCore with the two attributes that vLLM's ready response asks of its process variant."""

    frontend_stats_publish_address = None
    engine_index = 0


class LoadedCore:
    """A running engine core. Engine thread only, but for what never changes."""

    scheduler: PausingScheduler
    kv_manager: KVCacheManager
    block_pool: BlockPool
    # In the order of the ranks; one entry: its KV is in this process.
    ranks: list[RankFacts]
    marks: ReasoningMarks | None

    def __init__(self, config: VllmConfig, host_kv_bytes: int) -> None:
        """Load the model; takes seconds to minutes. `host_kv_bytes`: host memory for swapped KV."""
        # Block hashes name KV between workers, so all must start their chains alike.
        os.environ.setdefault("PYTHONHASHSEED", "0")
        self.config = config
        self.handover = handover_of(config)
        # Its requests have no outputs but the one.
        self.pooling: bool = config.model_config.runner_type != "generate"
        self.core = InProcessCore(config, Executor.get_class(config), log_stats=False)
        self.adapters = Adapters(config, self.core)
        self.scheduler = self.core.scheduler
        self.kv_manager = self.scheduler.kv_cache_manager
        self.block_pool = self.kv_manager.block_pool
        self.ranks = self._rpc_all("tailrace_facts")
        self.layout = Layout(self.scheduler.kv_cache_config, self.kv_manager)
        self.block_tokens: int = self.layout.block_tokens
        reason = next((each.live_reason for each in self.ranks if each.live_reason), "")
        if reason and self.handover.way is Way.LIVE:
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
            # Another connector may have the KV of preempted requests; two would bring it back at once.
            swaps = self.layout.plain and not self.scheduler.beside
            pool = HostPool(self._kv, host_kv_bytes if swaps else 0)
            self.host = HostLedger(pool.slots, pool.block_bytes)
            connector.pool = self.host_pool = pool
        self.scheduler.ours.ledger = self.host
        # Why evicted prefixes are not kept in host memory; empty: they are.
        self.no_tier = self._no_tier()
        if not self.no_tier:
            assert isinstance(connector, TailraceConnector) and self.host_pool is not None
            tier = HostTier(self.host, self.kv, self.host_pool, self.block_tokens)
            self.block_pool.metrics_collector = self.scheduler.ours.tier = tier
            connector.loads = HostLoads(self.host_pool)
        # The policy that orders the requests; None: vLLM's own order.
        self.intra: IntraPolicy | None = None
        self.marks = load_marks(config)
        self.grammars = Grammars()
        self.max_model_len: int = config.model_config.max_model_len
        # Of one request.
        self.max_blocks: int = cdiv(self.max_model_len, self.block_tokens)
        self.kv_blocks_total: int = config.cache_config.num_gpu_blocks - 1
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        # Set by the owner of the loop: one engine step, its outputs delivered.
        self.step_now: Callable[[], None] = _no_loop

    @property
    def ranked(self) -> bool:
        """Whether its KV is in ranks in processes of their own."""
        return len(self.ranks) > 1

    @property
    def kv(self) -> KvBlocks:
        """The KV of an engine with one rank. Any thread. Raises EngineRefusal."""
        if self._kv is None:
            raise EngineRefusal("its KV is in the ranks' processes")
        return self._kv

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that are not free; what only the prefix cache holds counts as free. Any thread."""
        return self.kv_blocks_total - int(self.block_pool.get_num_free_blocks())

    def _no_tier(self) -> str:
        if self.ranked:
            return "several ranks"
        if self.handover.way is not Way.LIVE:
            return self.handover.reason
        if not self.layout.plain:
            return "several KV cache groups, or none with full attention"
        if self.scheduler.beside:
            return "other KV connectors"
        if not self.finds_by_name:
            return "no prefix caching, or blocks that are not hashed individually"
        return "" if self.host.total else "no host memory for KV"

    # ---- steps

    @property
    def busy(self) -> bool:
        """Whether there is a step to begin, or one in flight to end."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def settle(self, request_id: str) -> None:
        """Step until no step in flight, no news to the model runner and no other connector's work is about a
        former request of this id. Raises EngineRefusal."""
        for _ in range(_SETTLING_STEPS):
            if not self._in_flight(request_id) and request_id not in self.scheduler.finished_req_ids:
                break
            self.step_now()
        else:
            raise RuntimeError(f"steps of request {request_id} did not end")
        beside = self.scheduler.beside
        if beside:
            self._step_while(
                lambda: beside.remember(request_id) or request_id in self.scheduler.requests,
                f"another KV connector does not end its work for request {request_id}",
            )
        self.settle_load(request_id)

    def settle_load(self, request_id: str) -> None:
        """Step until nothing comes from host memory for a former request of this id. Raises EngineRefusal."""
        tier = self.scheduler.ours.tier
        if tier is not None and tier.loading(request_id):
            self._step_while(
                lambda: tier.loading(request_id), f"KV of request {request_id} does not come from host memory"
            )

    def _step_while(self, goes_on: Callable[[], bool], reason: str) -> None:
        """Step as long as this is so. Raises EngineRefusal with the reason when it takes too long."""
        deadline_s = time.monotonic() + _COPIES_S
        while goes_on():
            if time.monotonic() > deadline_s:
                raise EngineRefusal(reason)
            self.step_now()
            time.sleep(_COPY_LOOK_S)

    def _in_flight(self, request_id: str) -> bool:
        batches = self.core.batch_queue or ()
        return any(request_id in scheduled.num_scheduled_tokens for _, scheduled, _ in batches)

    # ---- requests

    def decode(self, frames: Frames, client: int, adapter_version: str = "") -> Request:
        """vLLM's Request of a message. Raises EngineRefusal for what this engine cannot run, as an adapter of
        another version."""
        message: EngineCoreRequest = self._decoder.decode(frames)
        if (message.sampling_params is None) != self.pooling:
            runner = self.config.model_config.runner_type
            raise EngineRefusal(f"what a {runner!r} runner (runner) does not do")
        if message.prompt_token_ids is None or message.resumable:
            raise EngineRefusal("only complete prompts of token IDs are supported")
        prompt = message.prompt_token_ids
        if not prompt or len(prompt) >= self.max_model_len + self.pooling:
            raise EngineRefusal(f"a prompt of {len(prompt)} tokens with max_model_len {self.max_model_len}")
        if not message.mm_features and not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise EngineRefusal(f"a token id outside the vocabulary of {self._vocab_size}")
        if self.core.mm_receiver_cache is not None and message.mm_features:
            message.mm_features = self.core.mm_receiver_cache.get_and_update_features(message.mm_features)
        if message.lora_request is not None:
            message.lora_request = self.adapters.of_request(message.lora_request, adapter_version)
        message.client_index = client
        return Request.from_engine_core_request(message, self.core.request_block_hasher)

    def start_grammar(self, request: Request) -> None:
        """Begin to compile the request's grammar, if it has one."""
        if request.use_structured_output:
            self.core.structured_output_manager.grammar_init(request)

    def take_outputs(self, request: Request, output_token_ids: Sequence[int]) -> None:
        """Append tokens that were made elsewhere; the grammar, which must be ready, follows them.

        vLLM's own check finds the end of reasoning, from which on a grammar applies.
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
    def keeps_generators(self) -> bool:
        """Whether a seeded request has a generator, whose state goes with it (Model Runner V1)."""
        return not self.config.use_v2_model_runner

    def adopt(self, request: Request, generator_state: bytes) -> None:
        """Make the request known to the model runner, to enter the scheduler as a preempted one does."""
        self.settle(request.request_id)
        self._rpc("tailrace_adopt", Adoption.of(request, generator_state))
        self.scheduler.adopted.add(request.request_id)

    def forget(self, request_id: str) -> None:
        """Undo adopt, for a request that the scheduler was not given."""
        self.scheduler.adopted.discard(request_id)
        self._rpc("tailrace_forget", request_id)

    def generator_state(self, request_id: str) -> bytes:
        """State of the request's own generator; empty when it has none."""
        # The ranks of the last pipeline stage sample, each the same.
        state = self._rpc_all("tailrace_generator_state", request_id)[-1]
        assert isinstance(state, bytes)
        return state

    def tap(self, take: Callable[[StepStates], None]) -> HiddenStateTap:
        """Watch hidden states. Raises RuntimeError when this model's cannot be."""
        tap = self._rpc("tailrace_tap", take)
        assert isinstance(tap, HiddenStateTap)
        return tap

    def after_step(self) -> None:
        """What vLLM leaves undone when KV that was swapped out did not come back whole, if anything."""
        discarded, self.scheduler.discarded = self.scheduler.discarded, set()
        for request_id in discarded:
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                self._rpc("tailrace_rewind", Rewind(request_id, request.num_output_tokens))

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests and free their blocks, without an output; unknown ones are ignored."""
        self.core.abort_requests(list(request_ids))

    # ---- ranks in processes of their own

    def serve_ranks(self, address: Address) -> None:
        """Have each come to the worker at this address, to move its part of the KV."""
        self._rpc("tailrace_serve", address)

    def settle_ranks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Give what they keep of an import its places: those of all the request's blocks."""
        self._rpc("tailrace_settle", request_id, list(block_ids))

    # ---- blocks

    def blocks_of(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's blocks of the main group, first token first."""
        return self._groups_of(request_id)[self.layout.main or 0]

    def blocks_at(self, request_id: str, places: Sequence[Place]) -> list[KVCacheBlock]:
        """The request's blocks at these places."""
        groups = self._groups_of(request_id)
        return [groups[place.group][place.index] for place in places]

    def block_name(self, request: Request, number: int) -> bytes:
        """The name of a full block of the main group, by its tokens and all before them; empty where vLLM has
        none for it."""
        parts, rest = divmod(self.block_tokens, self.scheduler.hash_block_size)
        last = (number + 1) * parts - 1
        named = parts > 0 and not rest and last < len(request.block_hashes)
        return bytes(request.block_hashes[last]) if named else b""

    @property
    def finds_by_name(self) -> bool:
        """Whether blocks of the main group are in the prefix cache under the names of `block_name`.

        Not with another KV connector: it may have named what it has yet to load, and reads free blocks.
        """
        named = bool(self.block_pool.enable_caching) and self.scheduler.hash_block_size == self.block_tokens
        return named and not self.scheduler.beside

    @property
    def promised_blocks(self) -> int:
        """Free blocks that requests in the middle of their prompt will still need."""
        return int(self.scheduler._inflight_prefill_reserved_blocks())

    def cached(self, names: Sequence[bytes]) -> list[KVCacheBlock]:
        """Blocks of the main group that the prefix cache has by these names, up to the first that it has not.

        Names are those of `block_name`. The blocks may be evicted until they are part of a reservation.
        """
        main = self.layout.main
        # KV that comes from host memory in a step in flight has its names before it is known to be whole.
        if main is None or not self.finds_by_name or self.scheduler.unproven:
            return []
        found: list[KVCacheBlock] = []
        for name in names:
            blocks = self.block_pool.get_cached_block(name, [main]) if name else None
            if blocks is None:
                break
            found += blocks
        return found

    def held(self, names: Sequence[bytes]) -> list[KVCacheBlock | HostSlot]:
        """The same, on the device or, where it is not there, in host memory."""
        found: list[KVCacheBlock | HostSlot] = []
        while len(found) < len(names):
            rest = names[len(found) :]
            more = self.cached(rest) or [HostSlot(slot) for slot in self.host.find(rest)]
            if not more:
                break
            found += more
        return found

    def pin(self, blocks: Sequence[KVCacheBlock | HostSlot]) -> None:
        """One user more of each."""
        self.block_pool.touch([block for block in blocks if not isinstance(block, HostSlot)])
        for block in blocks:
            if isinstance(block, HostSlot):
                self.host.pin(block.slot)

    def unpin(self, blocks: Sequence[KVCacheBlock | HostSlot]) -> None:
        """One user less of each."""
        # Last block first, so that it is evicted from the prefix cache before those it builds on.
        self.block_pool.free_blocks([block for block in reversed(blocks) if not isinstance(block, HostSlot)])
        self.host.give_back([block.slot for block in blocks if isinstance(block, HostSlot)])

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """So many free blocks, of which there are enough, each with one user."""
        with self._taking():
            taken: list[KVCacheBlock] = self.block_pool.get_new_blocks(num_blocks)
        return taken

    def reserve(self, request: Request, num_blocks: int, cached: Sequence[KVCacheBlock] = ()) -> bool:
        """Give the request at least this many blocks; False, and nothing changed, when there is no room.

        num_blocks: at most max_blocks. `cached`: what it begins with, if it has no blocks yet. Leaves what
        requests in the middle of their prompt will still need, as vLLM does for loads.
        """
        tokens = min(num_blocks * self.block_tokens, self.max_model_len)
        return self._allocate(request, tokens - len(cached) * self.block_tokens, 0, cached)

    def reserve_for(self, request: Request, computed: int, cached: Sequence[KVCacheBlock] = ()) -> bool:
        """The same in every group, for a request that will come with so many tokens computed: the blocks that
        these need, and those of the tokens after them."""
        more = min(self.block_tokens, self.max_model_len - computed)
        external = computed - len(cached) * self.block_tokens
        return self._allocate(request, max(1, more), external, cached)

    def extend(self, request: Request) -> bool:
        """Bring a reservation to the tokens that the request has computed by now, and one more."""
        return self._allocate(request, 1, 0)

    def _allocate(
        self, request: Request, tokens: int, external: int, cached: Sequence[KVCacheBlock] = ()
    ) -> bool:
        """`cached`: of the main group, of a request without blocks; vLLM counts one more user of each, as for
        a prompt that it finds in its cache."""
        groups = range(len(self.kv_manager.coordinator.single_type_managers))
        found = KVCacheBlocks(tuple(list(cached) if group == self.layout.main else [] for group in groups))
        with self._taking():
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
        if self.scheduler.beside.may_read({each for ids in allocated.get_block_ids() for each in ids}):
            raise NoRoom("no room: another KV connector is still reading the free KV blocks")
        if self.scheduler.needs_kv_cache_zeroing:
            # vLLM would do it in the next step, and what is received may be there by then.
            self._rpc("tailrace_zero", self.kv_manager.take_new_block_ids())
        return True

    def _taking(self) -> AbstractContextManager[None]:
        tier = self.scheduler.ours.tier
        return nullcontext() if tier is None else tier.taking()

    def _groups_of(self, request_id: str) -> Sequence[Sequence[KVCacheBlock]]:
        groups: Sequence[Sequence[KVCacheBlock]] = self.kv_manager.get_blocks(request_id).blocks
        return groups

    def _rpc(self, method: str, *arguments: object) -> object:
        return self._rpc_all(method, *arguments)[0]

    def _rpc_all(self, method: str, *arguments: object) -> list[Any]:
        """Called in every rank, between two steps of its; their answers in their order."""
        answers: list[Any] = self.core.collective_rpc(method, args=arguments)
        return answers


def _no_loop() -> None:
    raise RuntimeError("this engine core has no loop")
