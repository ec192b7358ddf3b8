"""Errors of files that options name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_of(option: str) -> Iterator[None]:
    """Open the file of `option` (such as --journal) in the block: its OSError becomes one that names both."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        raise OSError(f"{option}: {named}") from error
