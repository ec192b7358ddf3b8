"""What one step does between the device and host memory, as the scheduler's side tells the worker's."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy blocks of the device to slots of host memory, or back: entry i of each list belongs together."""

    block_ids: list[int]
    slots: list[int]
    # What the blocks hold, by the tokens as the scheduler has them now.
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of a prompt that come back while the request waits, and other requests' steps go on."""

    request_id: str
    swap: Swap


@dataclass(slots=True)
class SwapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's: all of `out` in its order, before any of `back`, which is what `loaded` requests read, and
    before any of `loads`, which end when they do."""

    out: list[Swap] = field(default_factory=list)
    back: list[Swap] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)
