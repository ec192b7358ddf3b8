"""Hear from Envoy which requests have ended: it writes a line for each into a pipe, its access log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Most bytes that are read at a time.
_READ_BYTES: Final = 1 << 16
# A longer line is none of Envoy's.
_LINE_MAX: Final = 1 << 10


@contextmanager
def ends(pipe: Path, ended: Callable[[str, int], None]) -> Iterator[None]:
    """Make the pipe, and during the block call `ended(ticket, HTTP status)` for each line in it. Raise
    OSError."""
    os.mkfifo(pipe, 0o600)
    # Also for writing: without a writer, there would be an end of the file to read.
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    loop, rest = asyncio.get_running_loop(), b""

    def read() -> None:
        nonlocal rest
        try:
            *lines, rest = (rest + os.read(fd, _READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return
        rest = rest[:_LINE_MAX]
        for line in lines:
            ticket, _, status = line.decode("latin-1").partition(" ")
            # "²" is a digit, too, and no number.
            if status.isascii() and status.isdigit():
                ended(ticket, int(status))

    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)
