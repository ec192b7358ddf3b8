"""Describe the GPU and the machine, for readers of the figures."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from tests.harness.report import machine

_TIMEOUT_S: Final = 20.0
_QUERY: Final = ("name", "driver_version", "memory.total")
_PACKAGES: Final = ("vllm", "torch", "triton", "ucxx-cu13", "ucxx-cu12", "tailrace")


def nvidia_gpu() -> dict[str, str] | None:
    """Return name, driver and memory of the first NVIDIA GPU as nvidia-smi reports them; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return None
    return dict(zip(_QUERY, (part.strip() for part in lines[0].split(",")), strict=True))


def description() -> dict[str, object]:
    """Return machine, GPU and the versions of the measured software."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**machine(), "gpu": nvidia_gpu(), "versions": versions}
