"""Elect one leader among the services of a kind through etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from tailrace.records import ServiceRecord
from tailrace.service.tasks import cancel, supervise
from tailrace.store.store import LeasedValue, LeaseExpired, Store, StoreUnavailable


def lease_clock() -> float:
    """Return seconds of a clock that also runs while the process or machine is suspended: leases expire
    meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership(asyncio.Event):
    """An event that is set while this process leads.

    After the process was suspended (SIGSTOP, a suspended machine), it is unset at once if the lease has
    expired, even before the election's task has run again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._until_s = -math.inf
        self._on_end: list[Callable[[], None]] = []

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back at the end of each term, before another one can begin. It must not block or raise."""
        self._on_end.append(callback)

    def clear(self) -> None:
        """Do not lead any more."""
        led = super().is_set()
        super().clear()
        if led:
            for callback in self._on_end:
                callback()

    def hold_until(self, until_s: float) -> None:
        """Lead until `until_s` (lease_clock), or until `clear`."""
        self._until_s = until_s
        self.set()

    def is_set(self) -> bool:
        """Return whether this process leads now."""
        return super().is_set() and lease_clock() < self._until_s

    async def wait(self) -> Literal[True]:
        """Wait until this process leads."""
        while not self.is_set():
            self.clear()
            await super().wait()
        return True


log = logging.getLogger(__name__)

# How long a dead leader remains leader. etcd's smallest lease is 2 s.
_TTL_S: Final = 5.0
_RETRY_S: Final = 0.5
# Share of a lease's time after which its owner treats it as lost: the owner must stop before etcd lets
# another one lead.
_LEASE_SHARE: Final = 0.8

_random = random.SystemRandom()


class Election:
    """Campaign for `leader/<kind>` until closed.

    `leading` is set while this process is the leader, `following` while it is not. `leading` is cleared
    before the lease can have expired by this process's clock, and as soon as etcd shows another leader or
    none. The latter should not happen, but before 3.4.31 and 3.5.13 an etcd member that was suspended while
    it led revokes live leases. In addition, leaders write by compare-and-swap. A leader that could not reach
    etcd for a while leads again as soon as it can, if its lease still holds. A value without a lease is no
    leader's, and is replaced: nothing else would ever remove it.
    """

    def __init__(
        self,
        store: Store,
        record: ServiceRecord,
        leading: Leadership | None = None,
        ttl_s: float = _TTL_S,
    ) -> None:
        # Passed by callers whose parts need it before the election exists.
        self.leading = leading if leading is not None else Leadership()
        self.following = asyncio.Event()
        self.following.set()
        self._store = store
        self._key = f"leader/{record.kind}"
        self._value = msgspec.json.encode(record)
        self._ttl_s = ttl_s
        self._name = f"{record.kind} {record.service_id}"
        self._task: asyncio.Task[None] | None = None
        self._lease: int | None = None

    def start(self) -> None:
        """Begin to campaign."""
        self._task = supervise("election", self._campaign, self._key)

    async def close(self) -> None:
        """Stop, and resign so that the next candidate leads at once."""
        if self._task is not None:
            await cancel(self._task)
        if self._lease is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke_lease(self._lease)

    async def _campaign(self) -> None:
        while True:
            try:
                stray = await self._wait_until_vacant()
                requested_s = lease_clock()
                # Reuse the last attempt's lease if it still holds: our own key may be attached to it.
                if self._lease is None or not await self._store.renew_lease(self._lease):
                    requested_s = lease_clock()
                    self._lease = await self._store.grant_lease(self._ttl_s)
                # A lease that wins nothing expires by itself: nothing is attached to it.
                if await self._store.swap_leased(self._key, stray, self._value, self._lease):
                    await self._lead(self._lease, requested_s)
            except LeaseExpired:
                self._lease = None
            except StoreUnavailable as error:
                log.debug("election %s: %s", self._key, error)
                await asyncio.sleep(_RETRY_S * _random.uniform(0.5, 1.5))

    async def _wait_until_vacant(self) -> LeasedValue | None:
        """Wait until there is no leader, or etcd shows this process as the leader; return the value that is
        in the leader's place without a lease, if there is one."""
        async with aclosing(self._store.watch_prefix(self._key)) as watch:
            async for mapping in watch:
                if mapping.get(self._key) in (None, self._value):
                    break
                present = await self._store.get_leased(self._key)
                if present is not None and not present.lease:
                    log.warning("%s has a value without a lease, which is replaced", self._key)
                    return present
        return None

    async def _wait_until_replaced(self) -> None:
        """Wait until etcd shows another value than this process's."""
        async with aclosing(self._store.watch_prefix(self._key)) as watch:
            async for mapping in watch:
                if mapping.get(self._key) != self._value:
                    return

    async def _lead(self, lease: int, renewed_s: float) -> None:
        """Lead until the lease is lost or may be lost."""
        until_s = renewed_s + self._ttl_s * _LEASE_SHARE
        if lease_clock() >= until_s:
            return
        log.info("%s leads", self._name)
        self.following.clear()
        self.leading.hold_until(until_s)
        replaced = asyncio.create_task(self._wait_until_replaced(), name="leadership")
        try:
            while (left_s := until_s - lease_clock()) > 0:
                await asyncio.wait([replaced], timeout=min(left_s, self._ttl_s / 4))
                if replaced.done():
                    log.warning("%s: etcd no longer takes it for the leader", self._name)
                    return replaced.result()
                requested_s = lease_clock()
                try:
                    async with asyncio.timeout(max(0.0, until_s - requested_s)):
                        if not await self._store.renew_lease(lease):
                            return
                except (StoreUnavailable, TimeoutError) as error:
                    log.warning("%s: %s", self._name, error or "no answer in time")
                    continue
                until_s = requested_s + self._ttl_s * _LEASE_SHARE
                self.leading.hold_until(until_s)
        finally:
            self.leading.clear()
            self.following.set()
            replaced.cancel()
            await asyncio.wait([replaced])
            log.info("%s does not lead any more", self._name)
