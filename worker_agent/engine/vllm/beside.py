"""The KV connectors beside ours: what they do to blocks that are free, and to requests that are gone.

vLLM's contract is that a connector which still reads a finished request's blocks says so, and has vLLM keep
them. OffloadingConnector does not: it copies them when they are free already, and waits only when a step is
about to use them. A migration uses them outside of any step, so it must not take those. And whatever a
connector keeps by a request's id has to be gone before a request of that id comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from worker_agent.engine.vllm.connector import TailraceConnector
from worker_agent.engine.vllm.swaps import SwapMetadata


def ours_in(connector: KVConnectorBase_V1) -> TailraceConnector:
    """Our connector, which is this one or in it."""
    found = next(each for each in _all(connector) if isinstance(each, TailraceConnector))
    assert isinstance(found, TailraceConnector)
    return found


def swaps_in(metadata: KVConnectorMetadata) -> SwapMetadata:
    """What our connector tells its worker side in a step."""
    parts = [metadata] if isinstance(metadata, SwapMetadata) else metadata.metadata
    found = next(each for each in parts if isinstance(each, SwapMetadata))
    assert isinstance(found, SwapMetadata)
    return found


class Beside:
    """The other connectors of an engine, at its scheduler. Engine thread only."""

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        """`connector`: the scheduler's; it may be ours, and then there are none."""
        self._others = [each for each in _all(connector) if not isinstance(each, TailraceConnector)]
        self._offloading = [
            each.connector_scheduler
            for each in self._others
            if any(base.__name__ == "OffloadingConnector" for base in type(each).__mro__)
        ]
        # Blocks of requests that have ended since the connectors were last told of such.
        self._freed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._others)

    def frees(self, block_ids: Collection[int]) -> None:
        """A request with these blocks has ended."""
        self._freed.update(block_ids)

    def told(self) -> None:
        """The connectors know of every request that has ended."""
        self._freed.clear()

    def may_read(self, block_ids: Collection[int]) -> bool:
        """Whether any of these blocks, which no request has, is still to be copied."""
        if not self._freed.isdisjoint(block_ids):
            return True
        return any(
            not each._block_id_to_pending_jobs.keys().isdisjoint(block_ids) for each in self._offloading
        )

    def remember(self, request_id: str) -> bool:
        """Whether they have work to end that goes by this id."""
        return any(request_id in each._req_status for each in self._offloading)


def _all(connector: KVConnectorBase_V1) -> Sequence[KVConnectorBase_V1]:
    inner: Sequence[KVConnectorBase_V1] | None = getattr(connector, "sub_connectors", None)
    return [connector] if inner is None else inner
