"""Facts about an engine's ranks: one in this process, or several in their own processes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank and its part of the KV. `hardware` describes the device (see `hardware` below)."""

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


def hardware(device: torch.device) -> str:
    """Return a description of the device that is equal on equal machines: the GPU's name, or the CPU's name
    and a step's threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return str(device.type)
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    return f"{_cpu()}, {threads} threads"


def _cpu() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
