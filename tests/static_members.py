"""A membership that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.cluster import Pool, Stage
from tailrace.records import InstanceRecord, ProfileRecord, ServiceRecord
from tailrace.rollout.record import RolloutRecord
from tailrace.slo import Slo


@dataclass
class StaticMembers:
    """Members (tailrace/members.py) that change only when the test changes them."""

    instances: dict[str, InstanceRecord] = field(default_factory=dict)
    services: dict[tuple[str, str], ServiceRecord] = field(default_factory=dict)
    leaders: dict[str, ServiceRecord] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    profiles: dict[str, ProfileRecord] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    rollouts: dict[str, RolloutRecord] = field(default_factory=dict)
    unread_rollouts: frozenset[str] = frozenset()
    slo: Slo = Slo()  # noqa: RUF009 - immutable
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """See Members."""
        self._listeners.append(callback)

    def changed(self) -> None:
        """Call back the listeners."""
        for callback in self._listeners:
            callback()
