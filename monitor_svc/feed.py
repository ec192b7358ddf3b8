"""Queue state deltas for subscribers, each with a bound, and detect silent instances."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from monitor_svc.reports import Reports
from tailrace.store.membership import Membership
from tailrace.v1 import monitor_pb2

log = logging.getLogger(__name__)


_QUEUE_MAX: Final = 1_024
_BATCH_MAX: Final = 128


class Subscription:
    """One subscriber's queue. When it overflows it is dropped and replaced by a snapshot."""

    def __init__(self, reports: Reports, queue_max: int) -> None:
        self.resnapshots = -1
        self._reports = reports
        self._queue: deque[monitor_pb2.WorkerReport] = deque()
        self._queue_max = queue_max
        self._lost_reports = True
        self._changed = asyncio.Event()
        self._changed.set()

    def offer(self, report: monitor_pb2.WorkerReport | None) -> None:
        """Queue a report; None: only the set of silent instances has changed."""
        if report is not None and not self._lost_reports:
            if len(self._queue) < self._queue_max:
                self._queue.append(report)
            else:
                self._queue.clear()
                self._lost_reports = True
        self._changed.set()

    async def next(self) -> monitor_pb2.StateDelta:
        """Wait for changes; return the next delta."""
        await self._changed.wait()
        if self._lost_reports:
            self._lost_reports = False
            self._changed.clear()
            self.resnapshots += 1
            return self._reports.snapshot()
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_MAX))]
        if not self._queue:
            self._changed.clear()
        return monitor_pb2.StateDelta(reports=batch, silent_instance_ids=sorted(self._reports.silent))


class Feed:
    """All subscriptions."""

    def __init__(self, reports: Reports, queue_max: int = _QUEUE_MAX) -> None:
        # Snapshots sent to past subscribers whose queue had overflowed.
        self._resnapshots = 0
        self._reports = reports
        self._queue_max = queue_max
        self._subscriptions: set[Subscription] = set()

    @property
    def subscribers(self) -> int:
        """Return the number of subscribers."""
        return len(self._subscriptions)

    @property
    def resnapshots(self) -> int:
        """Return how often a subscriber's queue overflowed."""
        return self._resnapshots + sum(max(0, s.resnapshots) for s in self._subscriptions)

    def publish(self, report: monitor_pb2.WorkerReport | None) -> None:
        """Pass a report to every subscriber; None: only the set of silent instances has changed."""
        for subscription in self._subscriptions:
            subscription.offer(report)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Subscribe for the duration of the block; the first delta is a snapshot."""
        subscription = Subscription(self._reports, self._queue_max)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self._resnapshots += max(0, subscription.resnapshots)


_CHECKS_PER_TIMEOUT: Final = 8


async def watch_silence(reports: Reports, feed: Feed, members: Membership, silence_timeout_s: float) -> None:
    """Check for silent instances several times per timeout, until cancelled."""
    interval_s = silence_timeout_s / _CHECKS_PER_TIMEOUT
    checked_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        suspended_s = now_s - checked_s - interval_s
        checked_s = now_s
        if suspended_s > silence_timeout_s / 2:
            log.warning("this process was suspended for %.1f s", suspended_s)
            reports.extend_deadlines(suspended_s)
        if reports.update_silent(now_s):
            log.info("silent now: %s", ", ".join(sorted(reports.silent)) or "nobody")
            feed.publish(None)
        reports.forget(reports.silent - members.instances.keys())
