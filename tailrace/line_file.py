"""Append lines to a file so that a full disk damages no line but the one it cuts short."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class LineFile:
    """Append lines to a file, each in a single write, because several processes may share the file."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending; create it with mode 0o640 if it does not exist. Raise OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        # True while the file ends in a partially written line.
        self._torn = False

    def append(self, line: bytes) -> None:
        """Append `line`, which has no line break, and a line break. It is in the file when this returns; a
        crash of the machine may lose it.

        Raise OSError if the line was not written completely: ENOSPC if a part of it was. The next call then
        starts a new line.
        """
        whole = (b"\n" if self._torn else b"") + line + b"\n"
        # On a disk that becomes full, os.write may store a part and report no error.
        if os.write(self._fd, whole) < len(whole):
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        """Close the file; it must not be used afterwards."""
        os.close(self._fd)
