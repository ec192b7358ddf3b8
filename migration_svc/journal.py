"""What was opened and how it ended, on disk, one JSON line each.

A migration ends by itself whether or not this service lives. The journal is for the next run: what an earlier
one left open is cancelled at its target, should it still be there, and recorded as aborted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

# Lines after which the file is written anew, with what is open alone: a few megabytes.
_LINES_MAX: Final = 20_000


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Written before the target is called."""

    migration_id: str
    request_id: str
    source_instance_id: str
    target_instance_id: str
    target_address: str
    epoch: int
    reason: str
    policy: str
    opened_s: float


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """Written when the outcome is known."""

    migration_id: str
    committed: bool
    error: str = ""
    closed_s: float = 0.0


class JournalDamaged(OSError):
    """The file is not a journal; the message names file and line."""


class Journal:
    """A file that is appended to, and written anew, with what is open alone, once it has grown.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, lines_max: int = _LINES_MAX) -> None:
        """Raises OSError when the file cannot be opened, JournalDamaged when it is something else."""
        self._encoder = msgspec.json.Encoder()
        self._lines_max = lines_max
        # What an earlier run left open, oldest first.
        self.left_open: list[Opened] = []
        self._open: dict[str, Opened] = {}
        self._lines = 0
        self._path = path
        self._fd: int | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.left_open = _read(path)
        self._open = {entry.migration_id: entry for entry in self.left_open}
        self._fd = self._begin_anew(path)

    def write(self, entry: Opened | Closed) -> None:
        """Append a line. It is in the file when this returns; a crash of the machine may lose it."""
        if self._fd is None or self._path is None:
            return
        if isinstance(entry, Opened):
            self._open[entry.migration_id] = entry
        else:
            self._open.pop(entry.migration_id, None)
        os.write(self._fd, self._line(entry))
        self._lines += 1
        # Twice what is open at least, so that writing anew is rare whatever is open.
        if self._lines >= max(self._lines_max, 2 * len(self._open)):
            before, self._fd = self._fd, self._begin_anew(self._path)
            os.close(before)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin_anew(self, path: Path) -> int:
        """Only what is open is carried over, and the file replaced at once; its new descriptor."""
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_bytes(b"".join(map(self._line, self._open.values())))
        partial.replace(path)
        self._lines = len(self._open)
        return os.open(path, os.O_WRONLY | os.O_APPEND)

    def _line(self, entry: Opened | Closed) -> bytes:
        return self._encoder.encode(entry) + b"\n"


def _read(path: Path) -> list[Opened]:
    if not path.exists():
        return []
    open_now: dict[str, Opened] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = msgspec.json.decode(line, type=Opened | Closed)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break  # the last line, cut short by a kill: it was never acted upon
            raise JournalDamaged(
                f"{path}, line {number}: {error}; move the file away to start anew"
            ) from error
        if isinstance(entry, Opened):
            open_now[entry.migration_id] = entry
        else:
            open_now.pop(entry.migration_id, None)
    return list(open_now.values())
