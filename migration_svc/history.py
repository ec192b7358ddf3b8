"""The last migrations, open ones included, for whoever asks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tailrace.v1 import migration_pb2

KEPT: Final = 1000


class History:
    """Records by migration id, oldest first; at most KEPT of them."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, migration_pb2.MigrationRecord] = OrderedDict()

    def add(self, record: migration_pb2.MigrationRecord) -> None:
        """Keep a record; the caller goes on changing it."""
        self._records[record.migration_id] = record
        while len(self._records) > KEPT:
            self._records.popitem(last=False)

    def list(self, request_id: str, limit: int) -> list[migration_pb2.MigrationRecord]:
        """The newest `limit` (0: all) of a request ("": of all), newest first."""
        found = [r for r in reversed(self._records.values()) if request_id in ("", r.request_id)]
        return found[:limit] if limit else found
