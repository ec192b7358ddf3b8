"""What an engine's ranks share by name, and what removes it once they were killed."""

from __future__ import annotations

import contextlib
import glob
import tempfile
from pathlib import Path
from typing import Final

# What vLLM calls the file by which an engine's ranks meet, unique to them.
_MEETING: Final = "vllm_dist_"
_SHARED: Final = Path("/dev/shm")


def remove_meeting(name: str) -> None:
    """Remove the file of this name by which ranks met, and the memory that vLLM's ranks on a CPU share.

    Once no rank needs them any more; nothing happens if they are gone, or if vLLM had another way to meet.
    """
    if not name.startswith(_MEETING):
        return
    for path in (Path(tempfile.gettempdir(), name), *_SHARED.glob(f"{glob.escape(name)}-*")):
        with contextlib.suppress(OSError):
            path.unlink()
