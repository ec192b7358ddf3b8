"""Queue state deltas for subscribers, each with a bound, and detect silent instances."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from monitor_svc.reports import ReceivedReport, Reports
from tailrace.store.membership import Membership
from tailrace.v1 import monitor_pb2

log = logging.getLogger(__name__)


# Reports without a state, which nothing replaces.
_EVENTS_MAX: Final = 8_192
# Instances in a delta.
_BATCH_MAX: Final = 128
# Seconds between two deltas: reports of many instances wake a subscriber once. A delta costs the scheduler as
# much as ten reports.
_GATHER_S: Final = 0.01


class Subscription:
    """One subscriber's queue, of instances with something new: a subscriber that lags gets from each in turn
    its latest state and all phase events.

    When it overflows with events, it is replaced by a snapshot.
    """

    def __init__(self, reports: Reports, events_max: int) -> None:
        self.resnapshots = -1
        self._reports = reports
        self._events_max = events_max
        # New reports of each instance, in order; at most one of them is steady. Waiting longest first.
        self._queue: dict[str, list[ReceivedReport]] = {}
        # How many of them are not steady.
        self._events = 0
        self._lost_reports = True
        self._sent_s = -math.inf
        self._changed = asyncio.Event()
        self._changed.set()

    def offer(self, report: ReceivedReport | None) -> None:
        """Queue a report; None: only the set of silent instances has changed."""
        if report is not None and not self._lost_reports:
            new = self._queue.setdefault(report.message.instance_id, [])
            if report.steady:
                self._supersede(new)
            else:
                self._events += 1
            new.append(report)
            if self._events > self._events_max:
                self._queue.clear()
                self._events = 0
                self._lost_reports = True
        self._changed.set()

    def _supersede(self, new: list[ReceivedReport]) -> None:
        """Remove the state from the queued report of an instance that now has a later one."""
        index = next((index for index, report in enumerate(new) if report.steady), None)
        if index is not None:
            news = new[index].superseded()
            if news is None:
                del new[index]
            else:
                new[index] = news
                self._events += 1

    async def next(self) -> monitor_pb2.EncodedDelta:
        """Wait for changes; return the next delta."""
        await self._changed.wait()
        left_s = self._sent_s + _GATHER_S - time.monotonic()
        if left_s > 0 and len(self._queue) < _BATCH_MAX:
            await asyncio.sleep(left_s)
        self._sent_s = time.monotonic()
        if self._lost_reports:
            self._lost_reports = False
            self._changed.clear()
            self.resnapshots += 1
            return self._reports.snapshot()
        batch: list[bytes] = []
        for instance_id in list(itertools.islice(self._queue, _BATCH_MAX)):
            for report in self._queue.pop(instance_id):
                self._events -= not report.steady
                batch.append(report.encoded)
        if not self._queue:
            self._changed.clear()
        return monitor_pb2.EncodedDelta(reports=batch, silent_instance_ids=sorted(self._reports.silent))


class Feed:
    """All subscriptions."""

    def __init__(self, reports: Reports, events_max: int = _EVENTS_MAX) -> None:
        # Snapshots sent to past subscribers whose queue had overflowed.
        self._resnapshots = 0
        self._reports = reports
        self._events_max = events_max
        self._subscriptions: set[Subscription] = set()

    @property
    def subscribers(self) -> int:
        """Return the number of subscribers."""
        return len(self._subscriptions)

    @property
    def resnapshots(self) -> int:
        """Return how often a subscriber's queue overflowed."""
        return self._resnapshots + sum(max(0, s.resnapshots) for s in self._subscriptions)

    def publish(self, report: ReceivedReport | None) -> None:
        """Pass a report to every subscriber; None: only the set of silent instances has changed."""
        for subscription in self._subscriptions:
            subscription.offer(report)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Subscribe for the duration of the block; the first delta is a snapshot."""
        subscription = Subscription(self._reports, self._events_max)
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
