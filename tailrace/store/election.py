"""One leader among the services of a kind, elected through etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import msgspec

from tailrace.records import ServiceRecord
from tailrace.store.leadership import Leadership, lease_clock
from tailrace.store.store import LeaseExpired, Store, StoreUnavailable

log = logging.getLogger(__name__)

# How long a dead leader stays one. etcd's own smallest lease is 2 s.
_TTL_S: Final = 5.0
_RETRY_S: Final = 0.5
# Share of a lease's time after which it counts as lost here: its owner goes before etcd lets another one
# come.
_SAFE: Final = 0.8

_random = random.SystemRandom()


class Election:
    """Campaigns for `leader/<kind>` until closed.

    `leading` is set while this process is the leader, `following` while it is not. `leading` is cleared
    before the lease can have expired by this process's clock, and as soon as etcd shows another leader or
    none, which it should not: before 3.4.31 and 3.5.13 an etcd member that stood still while it led revokes
    leases that live. What a leader writes is compare-and-swap besides. A leader that etcd could not hear for
    a while leads again as soon as it can, if its lease still holds.
    """

    def __init__(
        self,
        store: Store,
        record: ServiceRecord,
        leading: Leadership | None = None,
        ttl_s: float = _TTL_S,
    ) -> None:
        # The caller's own where parts that need it are made before the election can be.
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
        self._task = asyncio.create_task(self._campaign(), name=f"election {self._key}")

    async def close(self) -> None:
        """Stop, and hand the leadership to whoever is next at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._lease is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke_lease(self._lease)

    async def _campaign(self) -> None:
        while True:
            try:
                await self._wait_vacant()
                asked_s = lease_clock()
                # The lease of the last attempt, where it still holds: our own key may hang on it.
                if self._lease is None or not await self._store.renew_lease(self._lease):
                    asked_s = lease_clock()
                    self._lease = await self._store.grant_lease(self._ttl_s)
                # A lease that wins nothing is left to expire: nothing hangs on it.
                if await self._store.create_leased(self._key, self._value, self._lease):
                    await self._lead(self._lease, asked_s)
            except LeaseExpired:
                self._lease = None
            except StoreUnavailable as error:
                log.debug("election %s: %s", self._key, error)
                await asyncio.sleep(_RETRY_S * _random.uniform(0.5, 1.5))
            except Exception:
                # Without this task the process would never lead again, and say nothing.
                log.exception("election %s", self._key)
                await asyncio.sleep(_RETRY_S)

    async def _wait_vacant(self) -> None:
        """Until nobody leads, or etcd takes this very process for the leader."""
        await self._until(lambda value: value in (None, self._value))

    async def _until(self, wanted: Callable[[bytes | None], bool]) -> None:
        async with aclosing(self._store.watch_prefix(self._key)) as watch:
            async for mapping in watch:
                if wanted(mapping.get(self._key)):
                    return

    async def _lead(self, lease: int, renewed_s: float) -> None:
        """Lead until the lease is lost or may be."""
        until_s = renewed_s + self._ttl_s * _SAFE
        if lease_clock() >= until_s:
            return
        log.info("%s leads", self._name)
        self.following.clear()
        self.leading.hold_until(until_s)
        replaced = asyncio.create_task(self._until(lambda value: value != self._value), name="leadership")
        try:
            while (left_s := until_s - lease_clock()) > 0:
                await asyncio.wait([replaced], timeout=min(left_s, self._ttl_s / 4))
                if replaced.done():
                    log.warning("%s: etcd no longer takes it for the leader", self._name)
                    return replaced.result()
                asked_s = lease_clock()
                try:
                    async with asyncio.timeout(max(0.0, until_s - asked_s)):
                        if not await self._store.renew_lease(lease):
                            return
                except (StoreUnavailable, TimeoutError) as error:
                    log.warning("%s: %s", self._name, error or "no answer in time")
                    continue
                until_s = asked_s + self._ttl_s * _SAFE
                self.leading.hold_until(until_s)
        finally:
            self.leading.clear()
            self.following.set()
            replaced.cancel()
            await asyncio.wait([replaced])
            log.info("%s no longer leads", self._name)
