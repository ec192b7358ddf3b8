"""What was opened and how it ended, on disk, one JSON line each.

A migration ends by itself whether or not this service lives. The journal is for the next run: what an earlier
one left open is cancelled at its target, should it still be there, and recorded as aborted. So migrations go
on while the journal cannot be written, as on a full disk; it is written anew as soon as it can be.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

import msgspec

log = logging.getLogger(__name__)

# Lines after which the file is written anew, with what is open alone: a few megabytes.
_LINES_MAX: Final = 20_000
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# How each line begins.
_OURS: Final = b'{"type":"'


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
        # The file lacks what was written last, and may end in the middle of a line.
        self._behind = False
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.left_open = _read(path)
        self._open = {entry.migration_id: entry for entry in self.left_open}
        try:
            self._fd = self._begin_anew(path)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._fall_behind(error)

    def write(self, entry: Opened | Closed) -> None:
        """Append a line. It is in the file when this returns; a crash of the machine may lose it.

        Where it cannot be written, that is logged once, and the next entry tries to write all that is open.
        """
        if self._path is None:
            return
        if isinstance(entry, Opened):
            self._open[entry.migration_id] = entry
        else:
            self._open.pop(entry.migration_id, None)
        try:
            # Twice what is open at least, so that writing anew is rare whatever is open.
            if self._fd is None or self._behind or self._lines >= max(self._lines_max, 2 * len(self._open)):
                before, self._fd = self._fd, self._begin_anew(self._path)
                if before is not None:
                    os.close(before)
            else:
                self._append(self._fd, self._line(entry))
        except OSError as error:
            self._fall_behind(error)
        else:
            if self._behind:
                log.info("the journal %s is written again", self._path)
            self._behind = False

    def _fall_behind(self, error: OSError) -> None:
        if not self._behind:
            log.error(
                "the journal %s cannot be written (%s): migrations go on, and a restart before it can be "
                "written again knows nothing of them",
                self._path,
                error.strerror,
            )
        self._behind = True

    def _append(self, fd: int, line: bytes) -> None:
        # A disk that fills up takes a part of the line, and that is no error yet.
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._lines += 1

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin_anew(self, path: Path) -> int:
        """Only what is open is carried over, and the file replaced at once; its new descriptor."""
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_bytes(b"".join(map(self._line, self._open.values())))
        # Opened before the file is replaced: either both succeed, or the old file stays in use.
        fd = os.open(partial, os.O_WRONLY | os.O_APPEND)
        try:
            partial.replace(path)
        except OSError:
            os.close(fd)
            raise
        self._lines = len(self._open)
        return fd

    def _line(self, entry: Opened | Closed) -> bytes:
        return self._encoder.encode(entry) + b"\n"


def _read(path: Path) -> list[Opened]:
    if not path.exists():
        return []
    open_now: dict[str, Opened] = {}
    damaged: list[str] = []
    ours = True
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            entry = msgspec.json.decode(line, type=Opened | Closed)
        except msgspec.DecodeError as error:
            damaged.append(f"line {number}: {error}")
            ours &= line.startswith(_OURS) or _OURS.startswith(line)
            continue
        if isinstance(entry, Opened):
            open_now[entry.migration_id] = entry
        else:
            open_now.pop(entry.migration_id, None)
    if not ours:
        # It would be overwritten.
        raise JournalDamaged(f"{path}, {damaged[0]}; move the file away to start anew")
    if damaged:
        # Cut short by a kill or a full disk. Losing one costs a cancellation that finds nothing, or an import
        # that ends by its own deadline; a service that does not start costs every migration.
        log.warning("%s: %d lines cannot be read and are skipped (%s)", path, len(damaged), damaged[0])
    return list(open_now.values())
