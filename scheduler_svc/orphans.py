"""Remove drains and pools of instances that are gone for good, and warn of rollouts that no front end serves.

Runs on the leading scheduler only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from tailrace.members import Members
from tailrace.store.client import StoreUnavailable

log = logging.getLogger(__name__)

KEEP_S: Final = 600.0
"""Seconds for which the drain and pool of an absent instance are kept: a restart, an upgrade, a reboot."""

_POLL_S: Final = 10.0


class OrphanedRecords:
    """Track since when the owner of each record is gone, as seen by this scheduler."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._gone_since: dict[str, float] = {}

    def due(self, members: Members, now_s: float) -> list[str]:
        """Return ids of instances whose records must be removed. A suspect instance is not gone."""
        absent = (members.drained | members.pools.keys()) - members.instances.keys()
        self._gone_since = {name: self._gone_since.get(name, now_s) for name in absent}
        return sorted(name for name, since_s in self._gone_since.items() if now_s - since_s >= self._keep_s)


class UnservedRollouts:
    """Track since when no front end serves the name of each finished rollout; warn of each once.

    The records are not removed: front ends that return with an old --model would send requests to the old
    model.
    """

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._unserved_since: dict[str, float] = {}
        self._warned: set[str] = set()

    def due(self, members: Members, now_s: float) -> list[str]:
        """Return the names to warn of now."""
        served = {service.model_name for service in members.services.values() if service.model_name}
        over = {name for name, rollout in members.rollouts.items() if not rollout.under_way}
        since = self._unserved_since
        self._unserved_since = {name: since.get(name, now_s) for name in over - served}
        due = {n for n, since_s in self._unserved_since.items() if now_s - since_s >= self._keep_s}
        new = sorted(due - self._warned)
        self._warned = due
        return new


async def remove_orphaned_records(
    members: Members,
    delete_records: Callable[[str], Awaitable[bool]],
    leading: asyncio.Event,
    keep_s: float = KEEP_S,
    poll_s: float = _POLL_S,
) -> None:
    """Check every `poll_s` seconds until cancelled.

    `delete_records` deletes an instance's records unless the instance exists (then it returns False): etcd
    decides, whatever this scheduler believes. It may raise StoreUnavailable.
    """
    orphans, unserved = OrphanedRecords(keep_s), UnservedRollouts(keep_s)
    while True:
        for name in unserved.due(members, time.monotonic()) if leading.is_set() else ():
            log.warning("no front end serves %s, which has a rollout: tailrace rollout forget %s", name, name)
        for name in orphans.due(members, time.monotonic()):
            if not leading.is_set():
                break
            try:
                if await delete_records(name):
                    log.info("removed the drain and pool of %s, which has been gone for %.0f s", name, keep_s)
            except StoreUnavailable as error:
                log.debug("records of %s: %s", name, error)
        await asyncio.sleep(poll_s)
