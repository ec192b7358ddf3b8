"""One picture from what several monitors tell. Pure: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tailrace.v1 import monitor_pb2


@dataclass(slots=True)
class _Latest:
    """The latest report of an instance that was taken, and which monitor told it."""

    incarnation: str
    seq: int
    monitor: str


class MergedReports:
    """Which reports are news, and who is silent.

    A worker tells one monitor at a time. When it turns to another, the one before goes on holding its last
    report, sends it to who watches anew, and soon calls the worker silent.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Latest] = {}
        # By monitor that is connected: whom it has heard of, and who of these is silent to it.
        self._heard: dict[str, set[str]] = {}
        self._silent: dict[str, frozenset[str]] = {}

    @property
    def connected(self) -> bool:
        """Whether any monitor tells us anything."""
        return bool(self._silent)

    @property
    def silent(self) -> frozenset[str]:
        """Instances that no connected monitor hears, of those that one has heard of."""
        named = frozenset[str]().union(*self._silent.values())
        return frozenset(
            name
            for name in named
            if all(name in silent for monitor, silent in self._silent.items() if name in self._heard[monitor])
        )

    def fresh(self, monitor: str, delta: monitor_pb2.StateDelta) -> Iterator[monitor_pb2.WorkerReport]:
        """Take a monitor's delta in; those of its reports that are news."""
        heard = self._heard.setdefault(monitor, set())
        if delta.snapshot:
            heard.clear()
        self._silent[monitor] = frozenset(delta.silent_instance_ids)
        for report in delta.reports:
            heard.add(report.instance_id)
            if self._is_news(monitor, report):
                yield report

    def disconnected(self, monitor: str) -> None:
        """The monitor tells nothing any more."""
        self._heard.pop(monitor, None)
        self._silent.pop(monitor, None)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forget instances that have left."""
        for name in self._latest.keys() - set(instance_ids):
            del self._latest[name]

    def _is_news(self, monitor: str, report: monitor_pb2.WorkerReport) -> bool:
        latest = self._latest.get(report.instance_id)
        if latest is not None and latest.incarnation == report.incarnation:
            # Of the same monitor all is news, also what it tells again in a snapshot: with events merged in.
            if latest.monitor != monitor and report.seq <= latest.seq:
                return False
            latest.seq, latest.monitor = max(latest.seq, report.seq), monitor
            return True
        self._latest[report.instance_id] = _Latest(report.incarnation, report.seq, monitor)
        return True
