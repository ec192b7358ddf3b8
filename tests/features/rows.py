"""A row of the table: how many streams of a feature were migrated, how, and how many are equal afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.fleet import Chat
from tailrace.v1 import types_pb2
from tests.features.moving import Moves


@dataclass(slots=True)
class Row:
    """One feature and sampling method."""

    feature: str
    sampling: str
    streams: int = 0
    equal: int = 0
    different: int = 0
    # Of the equal streams: those that had the fleet to themselves.
    alone: int = 0
    # In a run without migrations, with other streams: those that differ from another such run.
    unmoved: int = 0
    live: int = 0
    replayed: int = 0
    # Streams that were migrated at least twice.
    moved_twice: int = 0
    way_reasons: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    note: str = ""
    # The answer may differ from the undisturbed one; `note` says why.
    may_differ: bool = False
    # Its requests are never migrated.
    stays: bool = False

    def add(self, undisturbed: Chat, moved: Chat, moves: Moves) -> None:
        """Add a stream."""
        self.streams += 1
        same = moved.same_text_and_usage(undisturbed)
        self.equal += same
        self.different += not same
        replayed = [record for record in moves.committed if record.way == types_pb2.WAY_REPLAY]
        self.replayed += len(replayed)
        self.live += len(moves.committed) - len(replayed)
        self.moved_twice += len(moves.committed) > 1
        self.way_reasons.update(record.way_reason for record in replayed)
        self.failed += moves.failed

    def add_alone(self, undisturbed: Chat, moved: Chat, moves: Moves) -> None:
        """Add a stream that ran again with the fleet to itself, because it differed or was not migrated
        enough."""
        self.alone += moved.same_text_and_usage(undisturbed)
        self.add(undisturbed, moved, moves)

    def count(self, same: bool) -> None:
        """Add an answer that is never migrated."""
        self.streams += 1
        self.equal += same
        self.different += not same

    @property
    def passed(self) -> bool:
        """Whether every answer equals the undisturbed one, if it must; and each stream was migrated twice, if
        it can be."""
        same = self.may_differ or not self.different
        moved = self.stays or self.moved_twice == self.streams
        return self.streams > 0 and same and moved


def as_json(rows: Iterable[Row]) -> list[dict[str, object]]:
    """Convert rows for the figures' file."""
    return [{**asdict(row), "way_reasons": sorted(row.way_reasons)} for row in rows]


def from_json(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Read the rows that `as_json` has written."""
    return [Row(**{**row, "way_reasons": set(row["way_reasons"])}) for row in rows]
