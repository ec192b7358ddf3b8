"""Notices who has stopped reporting."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from monitor_svc.feed import Feed
from monitor_svc.reports import Reports
from tailrace.store.membership import Membership

log = logging.getLogger(__name__)

_LOOKS_A_PATIENCE: Final = 8


async def watch_silence(reports: Reports, feed: Feed, members: Membership, patience_s: float) -> None:
    """Look several times a patience, until cancelled."""
    interval_s = patience_s / _LOOKS_A_PATIENCE
    looked_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        stood_still_s = now_s - looked_s - interval_s
        looked_s = now_s
        if stood_still_s > patience_s / 2:
            log.warning("stood still for %.1f s", stood_still_s)
            reports.excuse(stood_still_s)
        if reports.look(now_s):
            log.info("silent now: %s", ", ".join(sorted(reports.silent)) or "nobody")
            feed.publish(None)
        reports.forget(reports.silent - members.instances.keys())
