"""What an engine's ranks are: one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, and its part of the KV. `hardware`: the device, in words."""

    rank: int
    process: int
    device_type: str
    hardware: str
    num_layers: int
    layer_block_bytes: int
    layout_name: str
    checksum_name: str
    # By which the ranks found each other: a file, and part of the names of the memory that they share.
    meeting: str
    # Why requests cannot move live with what this rank keeps; empty: they can.
    live_reason: str


def kv_name(facts: Sequence[RankFacts]) -> str:
    """What must be equal, rank by rank, for blocks of two engines to mean the same."""
    return " | ".join(f"{each.device_type} {each.layout_name} {each.checksum_name}" for each in facts)
