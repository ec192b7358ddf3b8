"""The KV connector: gives this process access to the engine's KV tensors, and swaps requests to host memory.

Migrations do not go through vLLM's connector interface: the engine's imports write to reserved blocks and its
exports read pinned ones, without any step waiting for them. For swaps, vLLM determines the time: a preempted
request's blocks are copied out at the start of the step that may overwrite them (`handle_preemptions`), and
when the request is admitted again, its tokens count as external hits and are loaded before the forward pass
(`start_load_kv`). Evicted prefixes are loaded the same way, but concurrently with steps (`HostTier`).

The user's connectors stand beside ours in vLLM's MultiConnector. They keep their configuration and take
precedence: if one of them has KV of a prompt, it loads that KV.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Final

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.version import __version__ as vllm_version

from tailrace import TESTED_VLLM
from tailrace.handover import LIVE, Handover, TransferMode, by_replay
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.host_pool import HostLoads, HostPool, HostTier, Swap, SwapMetadata, kv_names
from worker_agent.engine.vllm.internals import lacks_offloading
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.layouts import layout_name, live_reason, pages

_log = logging.getLogger(__name__)


class TailraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Worker side: `blocks` reads and writes KV by block, `pool` is the host memory, `loads` copies prefixes
    from it to the device.

    Scheduler side: `tier` takes evicted prefixes. Both sides: `ledger` keeps track of the pool's slots. All
    are attached once the engine is loaded; before that, and without host memory, nothing is swapped. Models
    with several KV cache groups do not swap, because vLLM does not accept corrupt blocks from a connector
    there. Engines with several ranks do not either, because their worker sides are in other processes.
    """

    blocks: KvBlocks | None
    layout_name: str
    # Why requests with this layout cannot migrate live; empty if they can.
    live_reason: str
    pool: HostPool | None
    # None if evicted prefixes are not cached.
    loads: HostLoads | None
    ledger: HostLedger
    tier: HostTier | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.blocks = None
        self.layout_name = self.live_reason = ""
        self.pool = None
        self.loads = None
        self.ledger = HostLedger(0, 0)
        self.tier = None
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._swaps = SwapMetadata()
        # Slots that the step in progress reads.
        self._read_slots: list[int] = []
        self._bad_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        # Exports pin the blocks that they hand over, so preemption needs no special care.
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        self.blocks = KvBlocks(pages(kv_caches, config), config.num_blocks)
        self.layout_name = layout_name(kv_caches, config)
        self.live_reason = live_reason(config)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, SwapMetadata)
        if kv_connector_metadata.swap_outs:
            assert self.blocks is not None
            self.blocks.wait_for_steps()
        for swap in kv_connector_metadata.swap_outs:
            assert self.pool is not None
            if not self.pool.save(swap.block_ids, swap.slots, swap.names):
                # A request whose swap is lost is recomputed once that cannot be loaded.
                self.ledger.discard(swap.names)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SwapMetadata)
        for swap in metadata.swap_ins:
            assert self.pool is not None
            self._bad_blocks.update(self.pool.load(swap.slots, swap.block_ids, swap.names))
        if metadata.loads:
            assert self.blocks is not None
            # vLLM may still have to zero some of the blocks.
            self.blocks.wait_for_steps()
        for load in metadata.loads:
            assert self.loads is not None
            self.loads.start(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = {} if self.loads is None else self.loads.pop_completed()
        for bad in ended.values():
            self._bad_blocks.update(bad)
        return None, set(ended) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def shutdown(self) -> None:
        if self.loads is not None:
            self.loads.close()

    # ---- scheduler side

    def begin_schedule(self) -> None:
        """Release the slots that the last step's swap-ins have read, and start collecting evictions."""
        self.ledger.release(self._read_slots)
        self._read_slots = []
        if self.tier is not None:
            self.tier.begin_schedule()

    def swap_out(self, request: Request, block_ids: list[int]) -> None:
        """Keep a preempted decoding request's KV in host memory if there is room. Call only while scheduling
        a step."""
        # vLLM recomputes requests that must not read the cache (those that want logprobs of their prompt).
        if not self.ledger.total or request.skip_reading_prefix_cache:
            return
        tokens = request.num_computed_tokens
        if tokens > request.num_tokens:
            # The KV of a token that is not known yet has no name.
            return
        names = kv_names(request, tokens, self._block_tokens)
        swapped = self.ledger.swap_out(request.request_id, tokens, names)
        if swapped is not None:
            self._swaps.swap_outs.append(Swap(block_ids[: len(names)], swapped.slots, names))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        swapped = self.ledger.get(request.request_id)
        if swapped is not None:
            return max(0, swapped.tokens - num_computed_tokens), False
        if self.tier is None:
            return 0, False
        kept = self.tier.match(request, num_computed_tokens)
        return kept, bool(kept)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        swapped = self.ledger.swap_in(request.request_id)
        if swapped is None:
            if num_external_tokens and self.tier is not None:
                self.tier.start_load(request, blocks.get_block_ids()[0])
            return
        self._read_slots += swapped.slots
        if not num_external_tokens:
            return
        first = (swapped.tokens - num_external_tokens) // self._block_tokens
        names = kv_names(request, swapped.tokens, self._block_tokens)
        block_ids = blocks.get_block_ids()[0]
        self._swaps.swapped_in.add(request.request_id)
        self._swaps.swap_ins.append(Swap(block_ids[first : len(names)], swapped.slots[first:], names[first:]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        swaps, self._swaps = self._swaps, SwapMetadata()
        if self.tier is not None:
            saves, swaps.loads = self.tier.end_schedule()
            # A request that was swapped out in this step may reuse a slot that these have lost.
            swaps.swap_outs = [*saves, *swaps.swap_outs]
        return swaps

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.tier is not None:
            self.tier.complete_loads(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.ledger.drop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])


_MULTI: Final = "MultiConnector"
_CHILDREN: Final = "connectors"
# Marks a MultiConnector that we created around a single user connector; vLLM does not read it.
_ALONE: Final = "tailrace_found_alone"
_OURS: Final[Mapping[str, object]] = {
    "kv_connector": "TailraceConnector",
    "kv_connector_module_path": "worker_agent.engine.vllm.connector",
    "kv_role": "kv_both",
}
_GIB: Final = 1 << 30


def transfer_config(arguments: MutableMapping[str, object]) -> KVTransferConfig:
    """Return vLLM's configuration with our connector added, and remove its sources from `arguments`.

    Raises TypeError or ValueError for values that vLLM does not accept.
    """
    given = arguments.pop("kv_transfer_config", None) or _offloading(arguments)
    if given is None:
        # Recompute KV that is corrupt when it is loaded from host memory.
        return KVTransferConfig(**_OURS, kv_load_failure_policy="recompute")
    if not isinstance(given, Mapping):
        raise TypeError(f"kv_transfer_config {given!r}: a JSON object expected")
    if given.get("kv_connector") != _MULTI:
        extra: dict[str, object] = {_CHILDREN: [dict(given), dict(_OURS)], _ALONE: given.get("kv_connector")}
        whole = {key: given[key] for key in ("engine_id", "kv_load_failure_policy") if key in given}
        whole["kv_role"] = given.get("kv_role", "kv_both")
        return KVTransferConfig(kv_connector=_MULTI, kv_connector_extra_config=extra, **whole)
    extra = dict(given.get("kv_connector_extra_config") or {})
    children = list(extra.get(_CHILDREN) or [])  # type: ignore[call-overload]
    if not any(child.get("kv_connector") == _OURS["kv_connector"] for child in children):
        children.append(dict(_OURS))
    return KVTransferConfig(**{**given, "kv_connector_extra_config": {**extra, _CHILDREN: children}})


def connector_reason(config: VllmConfig) -> str:
    """Return why requests cannot migrate live with this configuration's other connectors; empty if they can,
    or if there are none."""
    transfer = config.kv_transfer_config
    if transfer.kv_connector != _MULTI:
        return ""
    alone = transfer.kv_connector_extra_config.get(_ALONE)
    if alone:
        return f"kv_connector {alone} alone (inside a MultiConnector, requests migrate live)"
    if not transfer.is_kv_consumer:
        return f"kv_role {transfer.kv_role}: KV may come into blocks of steps in flight (not with kv_both)"
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        return "other KV connectors on an engine with several ranks"
    if transfer.has_connector("OffloadingConnector") and lacks_offloading():
        return f"this vLLM's OffloadingConnector lacks {', '.join(lacks_offloading())}"
    return ""


def _offloading(arguments: MutableMapping[str, object]) -> Mapping[str, object] | None:
    """Return the connector that vLLM would create for `kv_offloading_size` (GiB), in a MultiConnector."""
    size = arguments.pop("kv_offloading_size", None)
    backend = arguments.pop("kv_offloading_backend", "native")
    if size is None:
        return None
    if not isinstance(size, int | float):
        raise TypeError(f"kv_offloading_size {size!r}: a number of GiB expected")
    simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") == "1"
    native = "SimpleCPUOffloadConnector" if simple else "OffloadingConnector"
    child: dict[str, object] = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    if backend == "native":
        child |= {"kv_connector": native, "kv_connector_extra_config": {"cpu_bytes_to_use": size * _GIB}}
    return {
        "kv_connector": _MULTI,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {_CHILDREN: [child]},
    }


def handover_of(config: VllmConfig) -> Handover:
    """Return how requests of this configuration are handed over: by replay if live migration is not possible,
    not at all for pooling models. Never raises."""
    if config.model_config.runner_type != "generate":
        return Handover(
            TransferMode.STAYS, "a pooling model's request ends with the step that computes its prompt"
        )
    reason = _version_reason(vllm_version) or _feature_reason(config)
    return by_replay(reason) if reason else LIVE


def _version_reason(version: str) -> str:
    """Return why this version cannot migrate live; empty for versions that live migration is tested with."""
    if ".".join(version.split(".")[:2]) in TESTED_VLLM:
        return ""
    tested = ", ".join(f"{each}.x" for each in TESTED_VLLM)
    _log.warning("vLLM %s is not among the tested versions (%s): requests migrate by replay", version, tested)
    return f"vLLM {version}: live migration is tested with {tested}"


def _feature_reason(config: VllmConfig) -> str:
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        return f"speculative decoding by {speculative.method}: its draft model's state cannot be transferred"
    return _ranks_reason(config) or connector_reason(config)


def _ranks_reason(config: VllmConfig) -> str:
    """Return why an engine with these ranks cannot hand over KV live; empty if it can."""
    parallel = config.parallel_config
    if parallel.nnodes > 1:
        # The worker controls its ranks' transfers over sockets of this machine.
        return f"ranks on {parallel.nnodes} nodes"
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, setting)
        if size != 1:
            return f"{setting} {size}: a block's tokens are spread over the ranks"
    return ""


# The user's KV connectors next to ours: blocks they still read, and requests they still work on.
#
# vLLM's contract is that a connector which still reads a finished request's blocks says so, and vLLM keeps
# them. OffloadingConnector does not: it copies them after they have been freed, and waits only when a step is
# about to reuse them. A migration uses blocks outside of any step, so it must not take those. Also, a request
# must not return under an ID for which a connector still has state.


def tailrace_connector(connector: KVConnectorBase_V1) -> TailraceConnector:
    """Return our connector: `connector` itself, or the one inside a MultiConnector."""
    found = next(each for each in _all(connector) if isinstance(each, TailraceConnector))
    assert isinstance(found, TailraceConnector)
    return found


def swap_metadata(metadata: KVConnectorMetadata) -> SwapMetadata:
    """Return our connector's part of a step's metadata."""
    parts = [metadata] if isinstance(metadata, SwapMetadata) else metadata.metadata
    found = next(each for each in parts if isinstance(each, SwapMetadata))
    assert isinstance(found, SwapMetadata)
    return found


class OtherConnectors:
    """The scheduler side of an engine's other connectors; false if there are none. Engine thread only."""

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        """`connector` is the scheduler's, ours or a MultiConnector."""
        self._others = [each for each in _all(connector) if not isinstance(each, TailraceConnector)]
        self._offloading = [
            each.connector_scheduler
            for each in self._others
            if any(base.__name__ == "OffloadingConnector" for base in type(each).__mro__)
        ]
        # Blocks of requests that have ended since the connectors were last notified.
        self._freed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._others)

    def on_request_end(self, block_ids: Collection[int]) -> None:
        """Record the blocks of a request that has ended."""
        self._freed.update(block_ids)

    def on_schedule(self) -> None:
        """Forget recorded blocks: scheduling a step notifies the connectors of all requests that have
        ended."""
        self._freed.clear()

    def may_read(self, block_ids: Collection[int]) -> bool:
        """Return whether a connector may still copy any of these blocks, which no request uses."""
        if not self._freed.isdisjoint(block_ids):
            return True
        return any(
            not each._block_id_to_pending_jobs.keys().isdisjoint(block_ids) for each in self._offloading
        )

    def has_work(self, request_id: str) -> bool:
        """Return whether a connector still has work for a request of this ID."""
        return any(request_id in each._req_status for each in self._offloading)


def _all(connector: KVConnectorBase_V1) -> Sequence[KVConnectorBase_V1]:
    inner: Sequence[KVConnectorBase_V1] | None = getattr(connector, "sub_connectors", None)
    return [connector] if inner is None else inner
