"""List a process's open files by kind, and its TCP connections by peer, to find leaks."""

from __future__ import annotations

import collections
import ipaddress
import os
import re
import struct
from collections.abc import Set
from pathlib import Path
from typing import Final

_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
# Linux, include/net/tcp_states.h.
_LISTENING: Final = 10
_STATES: Final = {1: "established", 2: "connecting", 8: "closed by peer"}


def open_files(pid: int, proc: Path = Path("/proc")) -> dict[str, int]:
    """Return how many files of each kind a process has open, the most frequent first.

    Digits in names are replaced by N. A TCP connection counts by its state, its peer and the port that was
    connected to.
    """
    peers = _connections(proc / str(pid) / "net")
    kinds: collections.Counter[str] = collections.Counter()
    for path in (proc / str(pid) / "fd").iterdir():
        try:
            name = os.readlink(path)
        except OSError:
            # Closed since the folder was listed.
            continue
        inode = _SOCKET.fullmatch(name)
        peer = peers.get(inode[1]) if inode else None
        kinds[peer or re.sub(r"[0-9]+", "N", name)] += 1
    return dict(kinds.most_common())


def _connections(net: Path) -> dict[str, str]:
    """Return descriptions of all TCP connections of a network namespace by their inodes."""
    found = {}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in (net / table).read_text().splitlines()[1:]]
        listening = {_address(row[1])[1] for row in rows if int(row[3], 16) == _LISTENING}
        found.update({row[9]: _describe(row[1], row[2], int(row[3], 16), listening) for row in rows})
    return found


def _describe(local: str, remote: str, state: int, listening: Set[int]) -> str:
    _, local_port = _address(local)
    if state == _LISTENING:
        return f"listening on {local_port}"
    host, port = _address(remote)
    label = _STATES.get(state, f"state {state}")
    return f"{label} {host} port {local_port if local_port in listening else port}"


def _address(text: str) -> tuple[str, int]:
    """Parse an address of /proc/net/tcp: words of 32 bits in the machine's byte order, in hexadecimal."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
