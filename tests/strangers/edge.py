"""What other users of an edge's machine reach of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import psutil

_NOBODY: Final = 65_534
_LOOK_S: Final = 10.0


def open_to_others(port: int) -> list[str]:
    """Return what of the folder of the edge whose proxy listens here other users may read or connect to, by
    its modes and, if this process may change its user, as another user."""
    folder = _folder(port)
    found = [str(folder)] if folder.stat().st_mode & 0o077 else []
    for path in (folder, *folder.iterdir()):
        if path.is_socket() and path.stat().st_mode & 0o022:
            found.append(str(path))
        if os.geteuid() == 0:
            found += [f"{path} ({mode})" for mode in "rwx" if _may(path, mode)]
    names = {path.name for path in folder.iterdir()}
    if not {"edge.sock", "admin.sock", "envoy.json"} <= names:
        raise RuntimeError(f"not the folder of an edge: {folder} has {sorted(names)}")
    return found


def _folder(port: int) -> Path:
    """Return the folder of the files of the Envoy that listens on the port."""
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if listens and connection.laddr and connection.laddr.port == port and connection.pid:
            words = psutil.Process(connection.pid).cmdline()
            if "--config-path" in words:
                return Path(words[words.index("--config-path") + 1]).parent
    raise RuntimeError(f"no Envoy listens on port {port}")


def _may(path: Path, mode: str) -> bool:
    command = ["test", f"-{mode}", str(path)]
    done = subprocess.run(command, user=_NOBODY, group=_NOBODY, extra_groups=[], timeout=_LOOK_S, check=False)
    return done.returncode == 0
