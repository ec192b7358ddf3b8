"""A description of the hardware that an engine runs on, equal on equal machines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import torch

_CPU_INFO: Final = Path("/proc/cpuinfo")


def hardware(device: torch.device, cpu_threads: int | None) -> str:
    """Return the GPU's name, or the CPU's name and a step's threads (`cpu_threads`; None: OpenMP's
    choice)."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return str(device.type)
    threads = cpu_threads or os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    return f"{_cpu()}, {threads} threads"


def _cpu() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
