"""What must be installed before a local cluster can start: found out before anything is."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tailrace.local.options import ClusterOptions, Engine, Front


class Missing(RuntimeError):
    """Something is not installed; the message says what and how to get it."""


def require_installed(options: ClusterOptions) -> None:
    """Raise Missing for the first thing that is not there."""
    needs_vllm = options.engine is Engine.VLLM or options.front is Front.PYTHON
    if needs_vllm and find_spec("vllm") is None:
        raise Missing("vLLM is not installed; scripts/install.sh installs it (the CPU build where no GPU is)")
    if options.front is Front.RUST and _rust_front_end() is None:
        raise Missing("no vllm-rs executable; scripts/install.sh --rust fetches it (or take --front python)")
    if find_spec("ucxx") is None:
        raise Missing("ucxx, the KV transport, is not installed; scripts/install.sh installs it")


def _rust_front_end() -> str | None:
    """Where vllm-rs is: named by VLLM_RUST_FRONTEND_PATH, beside this Python, or on PATH."""
    named = os.environ.get("VLLM_RUST_FRONTEND_PATH")
    if named:
        return named if Path(named).exists() else None
    beside = Path(sys.executable).parent / "vllm-rs"
    return str(beside) if beside.exists() else shutil.which("vllm-rs")
