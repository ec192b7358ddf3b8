"""One leader among the services of a kind, elected through etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import msgspec

from tailrace.records import ServiceRecord
from tailrace.store.store import Store, StoreUnavailable

log = logging.getLogger(__name__)

# How long a dead leader stays one. etcd's own smallest lease is 2 s.
_TTL_S: Final = 5.0
_RETRY_S: Final = 0.5


class Election:
    """Campaigns for `leader/<kind>` until closed.

    `leading` is set while this process is the leader, `following` while it is not. `leading` is cleared
    before the lease can have expired by this process's clock, so that two never lead at once while etcd keeps
    its data; what a leader writes is compare-and-swap besides.
    """

    def __init__(
        self,
        store: Store,
        record: ServiceRecord,
        leading: asyncio.Event | None = None,
        ttl_s: float = _TTL_S,
    ) -> None:
        # An event of the caller's own where parts that need it are made before the election can be.
        self.leading = leading if leading is not None else asyncio.Event()
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
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._lease is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke_lease(self._lease)

    async def _campaign(self) -> None:
        while True:
            try:
                if self._lease is not None:
                    # After etcd was away our own old key may still stand in our way.
                    await self._store.revoke_lease(self._lease)
                    self._lease = None
                asked_s = time.monotonic()
                self._lease = await self._store.grant_lease(self._ttl_s)
                if await self._store.create_leased(self._key, self._value, self._lease):
                    await self._lead(self._lease, asked_s)
                else:
                    await self._store.revoke_lease(self._lease)
                    self._lease = None
                    await self._wait_vacant()
            except StoreUnavailable as error:
                log.debug("election %s: %s", self._key, error)
                await asyncio.sleep(_RETRY_S)
            except Exception:
                # Without this task the process would never lead again, and say nothing.
                log.exception("election %s", self._key)
                await asyncio.sleep(_RETRY_S)

    async def _wait_vacant(self) -> None:
        watch = self._store.watch_prefix(self._key)
        try:
            async for mapping in watch:
                if self._key not in mapping:
                    return
        finally:
            await watch.aclose()

    async def _lead(self, lease: int, renewed_s: float) -> None:
        """Lead until the lease is lost or may be."""
        log.info("%s leads", self._name)
        self.following.clear()
        self.leading.set()
        try:
            while (left_s := renewed_s + self._ttl_s * 0.8 - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, self._ttl_s / 4))
                asked_s = time.monotonic()
                try:
                    async with asyncio.timeout(max(0.0, renewed_s + self._ttl_s * 0.8 - asked_s)):
                        if not await self._store.renew_lease(lease):
                            return
                    renewed_s = asked_s
                except (StoreUnavailable, TimeoutError) as error:
                    log.warning("%s: %s", self._name, error or "no answer in time")
        finally:
            self.leading.clear()
            self.following.set()
            log.info("%s no longer leads", self._name)
