"""Deltas on their way to subscribers, each with a bound."""

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
    """One subscriber's queue. When it is full it is thrown away, and a snapshot takes its place."""

    def __init__(self, reports: Reports, queue_max: int) -> None:
        self.resnapshots = -1
        self._reports = reports
        self._queue: deque[monitor_pb2.WorkerReport] = deque()
        self._queue_max = queue_max
        self._behind = True
        self._news = asyncio.Event()
        self._news.set()

    def offer(self, report: monitor_pb2.WorkerReport | None) -> None:
        """Queue a report; None: only the silent ones have changed."""
        if report is not None and not self._behind:
            if len(self._queue) < self._queue_max:
                self._queue.append(report)
            else:
                self._queue.clear()
                self._behind = True
        self._news.set()

    async def next(self) -> monitor_pb2.StateDelta:
        """What to send next, once there is anything."""
        await self._news.wait()
        if self._behind:
            self._behind = False
            self._news.clear()
            self.resnapshots += 1
            return self._reports.snapshot()
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_MAX))]
        if not self._queue:
            self._news.clear()
        return monitor_pb2.StateDelta(reports=batch, silent_instance_ids=sorted(self._reports.silent))


class Feed:
    """All subscribers."""

    def __init__(self, reports: Reports, queue_max: int = _QUEUE_MAX) -> None:
        # Snapshots sent to subscribers that had fallen behind.
        self._resnapshots = 0
        self._reports = reports
        self._queue_max = queue_max
        self._subscriptions: set[Subscription] = set()

    @property
    def subscribers(self) -> int:
        """How many there are."""
        return len(self._subscriptions)

    @property
    def resnapshots(self) -> int:
        """How often a subscriber fell behind."""
        return self._resnapshots + sum(max(0, s.resnapshots) for s in self._subscriptions)

    def publish(self, report: monitor_pb2.WorkerReport | None) -> None:
        """Hand a report to every subscriber; None: only the silent ones have changed."""
        for subscription in self._subscriptions:
            subscription.offer(report)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """A subscription for as long as the block lasts; its first delta is a snapshot."""
        subscription = Subscription(self._reports, self._queue_max)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self._resnapshots += max(0, subscription.resnapshots)


_CHECKS_PER_PATIENCE: Final = 8


async def watch_silence(reports: Reports, feed: Feed, members: Membership, patience_s: float) -> None:
    """Look several times a patience, until cancelled."""
    interval_s = patience_s / _CHECKS_PER_PATIENCE
    looked_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        stood_still_s = now_s - looked_s - interval_s
        looked_s = now_s
        if stood_still_s > patience_s / 2:
            log.warning("stood still for %.1f s", stood_still_s)
            reports.extend_deadlines(stood_still_s)
        if reports.look(now_s):
            log.info("silent now: %s", ", ".join(sorted(reports.silent)) or "nobody")
            feed.publish(None)
        reports.forget(reports.silent - members.instances.keys())
