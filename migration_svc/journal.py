"""Record on disk which migrations were opened and how they ended, one JSON line each.

A migration ends by itself whether or not this service runs. The journal is for the next run: what an earlier
run left open is cancelled at its target, which tells how it ended. So migrations
continue while the journal cannot be written, as on a full disk; it is rewritten as soon as it can be.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf import json_format

from tailrace.files import LineFile, new_version
from tailrace.v1.migration_pb2 import MigrationRecord

log = logging.getLogger(__name__)

# Lines after which the file is rewritten with the open migrations only: a few megabytes.
_LINES_MAX: Final = 20_000
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# The prefix of every line.
_LINE_PREFIX: Final = b'{"type":"'


class JournalOpened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Written before the target is called."""

    record: MigrationRecord
    target_address: str


class JournalClosed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """Written when it has ended, in whatever way."""

    migration_id: str


def _to_json(record: object) -> object:
    """Return a MigrationRecord as msgspec encodes it."""
    if not isinstance(record, MigrationRecord):
        raise NotImplementedError
    return json_format.MessageToDict(record, preserving_proto_field_name=True)


def _from_json(_: type, record: Any) -> MigrationRecord:
    """Return a MigrationRecord that msgspec decodes. Raise ValueError."""
    try:
        return json_format.ParseDict(record, MigrationRecord(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error


class JournalDamaged(OSError):
    """The file is not a journal; the message names file and line."""


class Journal:
    """Append to a file, and rewrite it with the open migrations only once it has grown.

    Without a path nothing is recorded.
    """

    def __init__(self, path: Path | None, lines_max: int = _LINES_MAX) -> None:
        """Open the journal. Raise OSError if the file cannot be opened, JournalDamaged if it is not a
        journal."""
        self._encoder = msgspec.json.Encoder(enc_hook=_to_json)
        self._lines_max = lines_max
        # Migrations that an earlier run left open, oldest first.
        self.unfinished: list[JournalOpened] = []
        self._open: dict[str, JournalOpened] = {}
        self._lines = 0
        self._path = path
        self._file: LineFile | None = None
        # The file lacks the last entries, and may end in the middle of a line.
        self._incomplete = False
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.unfinished = _read(path)
        self._open = {entry.record.migration_id: entry for entry in self.unfinished}
        try:
            self._file = self._rewrite(path)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            self._write_failed(error)

    def write(self, entry: JournalOpened | JournalClosed) -> None:
        """Append an entry. It is in the file when this returns; a crash of the machine may lose it.

        If it cannot be written, that is logged once, and the next entry tries to rewrite all open migrations.
        """
        if self._path is None:
            return
        if isinstance(entry, JournalOpened):
            self._open[entry.record.migration_id] = entry
        else:
            self._open.pop(entry.migration_id, None)
        try:
            # At least twice the number of open migrations, so that rewriting is rare however many are open.
            if (
                self._file is None
                or self._incomplete
                or self._lines >= max(self._lines_max, 2 * len(self._open))
            ):
                previous, self._file = self._file, self._rewrite(self._path)
                if previous is not None:
                    previous.close()
            else:
                self._file.append(self._encoder.encode(entry))
                self._lines += 1
        except OSError as error:
            self._write_failed(error)
        else:
            if self._incomplete:
                log.info("the journal %s is written again", self._path)
            self._incomplete = False

    def _write_failed(self, error: OSError) -> None:
        if not self._incomplete:
            log.error(
                "the journal %s cannot be written (%s): migrations go on, and a restart before it can be "
                "written again knows nothing of them",
                self._path,
                error.strerror,
            )
        self._incomplete = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, path: Path) -> LineFile:
        """Replace the file by one with the open migrations only, and return it."""
        partial = new_version(path, 0o644)
        partial.write_bytes(b"".join(self._encoder.encode(entry) + b"\n" for entry in self._open.values()))
        # Open it before replacing the old file: either both succeed, or the old file stays in use.
        file = LineFile(partial)
        try:
            partial.replace(path)
        except OSError:
            file.close()
            raise
        self._lines = len(self._open)
        return file


def _read(path: Path) -> list[JournalOpened]:
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(JournalOpened | JournalClosed, dec_hook=_from_json)
    open_now: dict[str, JournalOpened] = {}
    damaged: list[str] = []
    is_journal = True
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            damaged.append(f"line {number}: {error}")
            is_journal &= line.startswith(_LINE_PREFIX) or _LINE_PREFIX.startswith(line)
            continue
        if isinstance(entry, JournalOpened):
            open_now[entry.record.migration_id] = entry
        else:
            open_now.pop(entry.migration_id, None)
    if not is_journal:
        # Not a journal, and it would be overwritten.
        raise JournalDamaged(f"{path}, {damaged[0]}; move the file away to start over")
    if damaged:
        # Truncated by a kill or a full disk. Losing an entry costs a cancellation that finds nothing, or an
        # import that ends by its own deadline; a service that does not start costs every migration.
        log.warning("%s: %d lines cannot be read and are skipped (%s)", path, len(damaged), damaged[0])
    return list(open_now.values())
