"""A row of the table: how many streams of a feature were moved, which way, and how many came out equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.features.moving import Moves
from examples.fleet import Chat
from tailrace.v1 import types_pb2


@dataclass(slots=True)
class Row:
    """One feature and way of sampling."""

    feature: str
    sampling: str
    streams: int = 0
    equal: int = 0
    different: int = 0
    # Of those that are equal: with the fleet to themselves.
    alone: int = 0
    # Of a run without moves, among others: streams that differ from another such run.
    unmoved: int = 0
    live: int = 0
    replayed: int = 0
    # Streams that were moved twice or more.
    moved_twice: int = 0
    way_reasons: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    note: str = ""
    # The answer need not be the undisturbed one; `note` says why.
    may_differ: bool = False
    # Nothing of it is ever moved.
    stays: bool = False

    def add(self, undisturbed: Chat, moved: Chat, moves: Moves) -> None:
        """One more stream."""
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
        """One more stream, which came out otherwise among others or was not moved enough."""
        self.alone += moved.same_text_and_usage(undisturbed)
        self.add(undisturbed, moved, moves)

    def count(self, same: bool) -> None:
        """One more answer that is not moved."""
        self.streams += 1
        self.equal += same
        self.different += not same

    @property
    def right(self) -> bool:
        """Every answer is the undisturbed one, if it must be; each stream was moved twice, if it moves."""
        same = self.may_differ or not self.different
        moved = self.stays or self.moved_twice == self.streams
        return self.streams > 0 and same and moved


def as_json(rows: Iterable[Row]) -> list[dict[str, object]]:
    """For the figures' file."""
    return [{**asdict(row), "way_reasons": sorted(row.way_reasons)} for row in rows]


def from_json(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """What `as_json` wrote."""
    return [Row(**{**row, "way_reasons": set(row["way_reasons"])}) for row in rows]
