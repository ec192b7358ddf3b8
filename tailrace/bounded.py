"""Bounds of what comes from outside: files that end, and texts that fit into a message or a line."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MAX_BYTES: Final = 1 << 30
_SHOWN: Final = 60


def shown(value: object) -> str:
    """Return a value for a message, in quotes, cut off where it is long."""
    text = str(value)
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Return a text with escapes in place of the characters by which it could act on a terminal or a log."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def open_regular(path: Path, max_bytes: int = MAX_BYTES) -> BinaryIO:
    """Open a regular file of at most `max_bytes`: a device or a pipe may have no end, or never begin.

    Raise OSError, whose text says what is wrong.
    """
    # A pipe without a writer would keep open() waiting.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    status = os.fstat(file.fileno())
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file"
    elif status.st_size > max_bytes:
        problem = f"{status.st_size} bytes are more than the limit of {max_bytes}"
    if problem:
        file.close()
        raise OSError(errno.EINVAL, problem, str(path))
    return file


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes`. Raise OSError."""
    with open_regular(path, max_bytes) as file:
        return file.read()
