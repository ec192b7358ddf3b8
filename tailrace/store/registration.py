"""A value in etcd that lives as long as the process that put it there."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from tailrace.store.client import LeaseExpired, StoreUnavailable
from tailrace.store.store import Store

log = logging.getLogger(__name__)

_TOMBSTONE_TTL_S: Final = 120.0
_RETRY_S: Final = 0.5

_random = random.SystemRandom()


async def register(store: Store, key: str, value: bytes, ttl_s: float = 10.0) -> Registration:
    """Keep a value in etcd while this process lives; closing the store withdraws it.

    Raises StoreUnavailable.
    """
    registration = Registration(store, key, value, ttl_s)
    await registration.start()
    return registration


class Registration:
    """A leased key. Renews the lease; puts the value again when the lease was lost.

    A key that another process has taken meanwhile (a restarted worker of the same name) is left to it, and
    taken back only when it is free; `on_replaced` tells.
    """

    def __init__(self, store: Store, key: str, value: bytes, ttl_s: float) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._ttl_s = ttl_s
        self._lease = 0
        self._task: asyncio.Task[None] | None = None
        self._replaced: list[Callable[[bytes], None]] = []
        # The value that was last told of as another's.
        self._other = b""
        # Writes of the key, one at a time: an update must not race with a re-registration.
        self._writing = asyncio.Lock()

    def on_replaced(self, callback: Callable[[bytes], None]) -> None:
        """Call back when another process is found to have put its own value in place of ours, with that
        value.

        Found at the next renewal, which is after a third of the lease's time; once for each other value. The
        callback must not block or raise.
        """
        self._replaced.append(callback)

    async def start(self) -> None:
        """Put the value, whoever had the key before, and begin to keep it. Raises StoreUnavailable."""
        self._lease = await self._store.grant_lease(self._ttl_s)
        await self._store.put_leased(self.key, self._value, self._lease)
        self._task = asyncio.create_task(self._keep(), name=f"registration {self.key}")
        self._store.before_close(self.withdraw)

    async def update(self, value: bytes) -> None:
        """Replace the value. Raises StoreUnavailable; the value is then put once etcd is back.

        A key that another process has taken is left to it.
        """
        async with self._writing:
            before, self._value = self._value, value
            held = await self._store.get_leased(self.key)
            if held is not None and held.value != before and held.lease != self._lease:
                self._notify_replaced(held.value)
            else:
                await self._store.swap_leased(self.key, held, value, self._lease)

    async def withdraw(self) -> None:
        """Stop keeping the key and delete it; readers see a withdrawal. Without etcd the lease expires."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            await self._store.withdraw(self.key, self._value, _TOMBSTONE_TTL_S)
            await self._store.revoke_lease(self._lease)
        except StoreUnavailable as error:
            log.warning("withdrawing %s: %s; its lease will expire", self.key, error)
        self._store.forget_close(self.withdraw)

    async def _keep(self) -> None:
        pause_s = self._ttl_s / 3
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._renew()
                pause_s = self._ttl_s / 3
            except StoreUnavailable as error:
                log.warning("keeping %s: %s", self.key, error)
                pause_s = _RETRY_S * _random.uniform(0.5, 1.5)
            except Exception:
                # Without this task the process would leave the fleet while it serves.
                log.exception("keeping %s", self.key)
                pause_s = _RETRY_S

    async def _renew(self) -> None:
        """Renew the lease, and see that what hangs on it is still there. Raises StoreUnavailable."""
        async with self._writing:
            alive = await self._store.renew_lease(self._lease)
            held = await self._store.get_leased(self.key)
            if held is not None and held.lease != self._lease and held.value != self._value:
                self._notify_replaced(held.value)
                return
            if alive and held is not None and (held.value, held.lease) == (self._value, self._lease):
                return
            if not alive:
                log.warning("lease of %s was lost; registering again", self.key)
                self._lease = await self._store.grant_lease(self._ttl_s)
            try:
                await self._store.swap_leased(self.key, held, self._value, self._lease)
            except LeaseExpired:
                log.warning("lease of %s was lost again", self.key)

    def _notify_replaced(self, other: bytes) -> None:
        if other == self._other:
            return
        self._other = other
        log.error("%s is now another process's", self.key)
        for callback in self._replaced:
            callback(other)
