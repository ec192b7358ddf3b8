"""KV copies between the device and host memory: what the connector's scheduler side sends its worker side."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Swap:
    """A copy of blocks between the device and host memory: entry i of each list describes one block."""

    block_ids: list[int]
    slots: list[int]
    # Content names, from the tokens that the scheduler knows now.
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of prompt blocks to the device while the request waits and steps for other requests continue."""

    request_id: str
    swap: Swap


@dataclass(slots=True)
class SwapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one step. `swap_outs` run first, in order, then `swap_ins`, which complete before the
    forward pass; `loads` are started last and complete in later steps."""

    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    # Requests that read KV loaded in this step.
    swapped_in: set[str] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)
