"""Facts about an engine's ranks: one in this process, or several in their own processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank and its part of the KV. `hardware` describes the device."""

    rank: int
    process: int
    device_type: str
    hardware: str
    num_layers: int
    layer_block_bytes: int
    layout_name: str
    checksum_name: str
    # Name of the ranks' rendezvous file, also part of the names of their shared memory.
    meeting: str
    # Why requests with this rank's KV cannot migrate live; empty if they can.
    live_reason: str


def kv_name(facts: Sequence[RankFacts]) -> str:
    """Return a description of all ranks that must be equal for two engines' blocks to be compatible."""
    return " | ".join(f"{each.device_type} {each.layout_name} {each.checksum_name}" for each in facts)
