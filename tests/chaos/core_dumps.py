"""Native stacks of processes that crashed.

When a native library crashes a process, the trace in its log ends at the last Python frame. A core dump says
which native function it was.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
_GDB_S: Final = 60.0
_MAX_FRAMES: Final = 60


def allow_core_dumps() -> None:
    """Let this process and those it starts dump core when they crash, as far as the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def take_core(folder: Path, to: Path) -> Path | None:
    """Move the core dump of a process that ran in `folder` to the file `to`; return None if there is none.

    There is none if the kernel passes core dumps to a program or writes them to a folder of its own: that
    setting belongs to the whole machine, so it is left as it is.
    """
    pattern = _PATTERN.read_text().strip()
    if pattern.startswith("|") or "/" in pattern:
        return None
    # The pattern may append the process ID and more.
    stem = pattern.partition("%")[0].rstrip(".") or "core"
    cores = sorted(
        (path for path in folder.glob(f"{stem}*") if path.is_file() and _is_core(path)),
        key=lambda path: path.stat().st_mtime,
    )
    if not cores:
        return None
    shutil.move(cores[-1], to)
    return to


def native_stack(core: Path) -> str:
    """Return the stack of the thread that crashed, with the registers; or why it cannot be read.

    Takes up to a minute.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        return "gdb is not installed"
    commands = [f"backtrace {_MAX_FRAMES}", "info registers", "x/8i $pc-16", "info sharedlibrary cygrpc"]
    arguments = [word for command in commands for word in ("-ex", command)]
    try:
        done = subprocess.run(
            [gdb, "-batch", "-nx", *arguments, os.path.realpath(sys.executable), str(core)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GDB_S,
        )
    except subprocess.TimeoutExpired:
        return f"gdb did not finish within {_GDB_S:g} s"
    return done.stdout


def _is_core(path: Path) -> bool:
    """Return whether a file is an ELF core dump: another file may have the name."""
    with path.open("rb") as file:
        header = file.read(18)
    return header[:4] == b"\x7fELF" and header[16:18] == b"\x04\x00"
