"""The configuration of an engine's KV connectors: ours and those of the user.

vLLM's MultiConnector combines several. The user's connectors keep their configuration and take precedence: if
one of them has KV of a prompt, it loads that KV.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Final

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.version import __version__ as vllm_version

from tailrace import TESTED_VLLM
from tailrace.handover import LIVE, Handover, TransferMode, by_replay
from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.host_pool import SwapMetadata
from worker_agent.engine.vllm.internals import lacks_offloading

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


_log = logging.getLogger(__name__)


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
