"""The GPUs of this machine, for workers to share."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

_TIMEOUT_S: Final = 10.0


def visible_gpus() -> tuple[str, ...]:
    """Ids of the GPUs that may be used: those in CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split()) if done.returncode == 0 else ()
