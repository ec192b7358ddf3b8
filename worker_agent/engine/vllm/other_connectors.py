"""The user's KV connectors next to ours: blocks they still read, and requests they still work on.

vLLM's contract is that a connector which still reads a finished request's blocks says so, and vLLM keeps
them. OffloadingConnector does not: it copies them after they have been freed, and waits only when a step is
about to reuse them. A migration uses blocks outside of any step, so it must not take those. Also, a request
must not return under an ID for which a connector still has state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.host_pool import SwapMetadata


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
