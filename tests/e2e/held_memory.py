"""What a vLLM worker holds, as a plugin of vLLM that answers at a socket.

The memory that a process has resident is coarse: allocators keep megabytes of what was freed. The number of
live objects shows one that is kept per migration after a few hundred, and that of each type after a dozen.
"""

from __future__ import annotations

import ctypes
import gc
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.waiting import WAIT_S

_METADATA = "Metadata-Version: 2.1\nName: held-memory\nVersion: 1.0\n"
_ENTRY_POINTS = "[vllm.general_plugins]\nheld_memory = tests.e2e.held_memory:install\n"


# Whose types are counted one by one: there are few of each in an idle worker.
_PACKAGES = ("_asyncio", "tailrace", "vllm", "worker_agent")


@dataclass(frozen=True)
class Held:
    """What Python and C hold after a garbage collection: live objects, and bytes that were not freed."""

    objects: int = 0
    allocated_mb: float = 0.0
    # Instances of types of ours, of vLLM's and of asyncio's.
    kinds: Mapping[str, int] = field(default_factory=dict)


def write_plugin(folder: Path) -> str:
    """Write the plugin's metadata, by which vLLM finds it; return the folder to add to PYTHONPATH."""
    package = folder / "held_memory-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(_METADATA)
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    return str(folder)


def install() -> None:
    """Answer every connection. Called by vLLM in the process of the engine, possibly more than once."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name("self"))
    except OSError:
        listener.close()
        return
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), name="held memory", daemon=True).start()


def held(pid: int) -> Held:
    """Return what the process of a worker with this plugin holds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(_name(str(pid)))
        with connection.makefile() as reply:
            return Held(**json.loads(reply.read()))


def _name(process: str) -> bytes:
    """Return the address of a process, in Linux' abstract namespace."""
    return f"\0tailrace-held-{Path(f'/proc/{process}').resolve().name}".encode()


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(asdict(_measured())).encode())


class _Mallinfo(ctypes.Structure):
    """What mallinfo2 of glibc returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _measured() -> Held:
    # Twice: what a finalizer drops is free only after the next one.
    gc.collect()
    gc.collect()
    kinds = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if kind.__module__.partition(".")[0] in _PACKAGES
    )
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return Held(sys.getallocatedblocks(), (info.uordblks + info.hblkhd) / (1 << 20), dict(kinds))
