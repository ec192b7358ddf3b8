"""Bounds of what comes from outside: files that end, and texts that fit into a message or a line."""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

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


# Seconds, rates, factors: whatever it counts, more is a slip of the pen.
_REAL_MAX: Final = 1e12
# Exact as a float, too; larger than any number of bytes or tokens here.
_WHOLE_MAX: Final = 2**53


class RealRange(click.FloatRange):
    """A finite number within bounds; without `max`, up to 1e12."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raise click.BadParameter."""
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{shown(value)} is not a finite number", param, ctx)
        if abs(number) > _REAL_MAX:
            self.fail(f"{shown(value)} is out of range", param, ctx)
        converted: float = super().convert(number, param, ctx)
        return converted


class WholeRange(click.IntRange):
    """A whole number within bounds; without `max`, up to 2**53."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raise click.BadParameter."""
        try:
            number = int(value)
        except (ValueError, OverflowError):
            self.fail(f"{shown(value)} is not a whole number", param, ctx)
        if abs(number) > _WHOLE_MAX:
            self.fail(f"{shown(value)} is out of range", param, ctx)
        converted: int = super().convert(number, param, ctx)
        return converted
