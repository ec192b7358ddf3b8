"""Register a value in etcd for as long as this process lives."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from tailrace.service.tasks import cancel, supervise
from tailrace.store.client import LeaseExpired, StoreUnavailable
from tailrace.store.store import LeasedValue, Store

log = logging.getLogger(__name__)

_TOMBSTONE_TTL_S: Final = 120.0
TTL_S: Final = 10.0
"""Time to live of the lease of a process that renews it."""
_RETRY_S: Final = 0.5

_random = random.SystemRandom()


async def register(store: Store, key: str, value: bytes, ttl_s: float = TTL_S) -> Registration:
    """Keep a value in etcd while this process lives; closing the store withdraws it. Raise
    StoreUnavailable."""
    registration = Registration(store, key, value, ttl_s)
    await registration.start()
    return registration


class Registration:
    """A leased key: renew the lease, and write the value again when the lease was lost.

    A key that another process has taken meanwhile (a restarted worker of the same name) is left to it, and
    taken back only once it is free; `on_replaced` reports that. A value without a lease is no process's, and
    is replaced.
    """

    def __init__(self, store: Store, key: str, value: bytes, ttl_s: float) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._ttl_s = ttl_s
        self._lease = 0
        self._pause_s = ttl_s / 3
        self._task: asyncio.Task[None] | None = None
        self._replaced: list[Callable[[bytes], None]] = []
        # The other process's value that was last reported.
        self._reported_value = b""
        # Serialises writes of the key: an update must not race with a re-registration.
        self._writing = asyncio.Lock()

    def on_replaced(self, callback: Callable[[bytes], None]) -> None:
        """Call back with the value by which another process has replaced ours.

        Detected at the next renewal, after a third of the lease's time; reported once for each other value.
        The callback must not block or raise.
        """
        self._replaced.append(callback)

    async def start(self) -> None:
        """Write the value, replacing any previous one, and begin to renew it. Raise StoreUnavailable."""
        self._lease = await self._store.grant_lease(self._ttl_s)
        await self._store.put_leased(self.key, self._value, self._lease)
        self._task = supervise("registration", self._keep_alive, self.key)
        self._store.before_close(self.withdraw)

    async def update(self, value: bytes) -> None:
        """Replace the value. Raise StoreUnavailable, in which case it is written once etcd is back.

        A key that another process has taken is left to it.
        """
        async with self._writing:
            before, self._value = self._value, value
            held = await self._store.get_leased(self.key)
            if held is not None and held.value != before and self._is_of_another(held):
                self._notify_replaced(held.value)
            else:
                await self._store.swap_leased(self.key, held, value, self._lease)

    async def withdraw(self) -> None:
        """Delete the key and mark it as withdrawn for readers. If etcd cannot be reached the lease
        expires."""
        if self._task is None:
            return
        await cancel(self._task)
        self._task = None
        try:
            await self._store.withdraw(self.key, self._value, _TOMBSTONE_TTL_S)
            await self._store.revoke_lease(self._lease)
        except StoreUnavailable as error:
            log.warning("deregistering %s: %s; its lease will expire", self.key, error)
        self._store.forget_close(self.withdraw)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            # However this attempt fails, the next one must come before the lease ends.
            self._pause_s = _RETRY_S * _random.uniform(0.5, 1.5)
            try:
                await self._renew()
                self._pause_s = self._ttl_s / 3
            except StoreUnavailable as error:
                log.warning("keeping %s: %s", self.key, error)

    async def _renew(self) -> None:
        """Renew the lease, and check that the value is still there. Raise StoreUnavailable."""
        async with self._writing:
            alive = await self._store.renew_lease(self._lease)
            held = await self._store.get_leased(self.key)
            if held is not None and held.value != self._value and self._is_of_another(held):
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

    def _is_of_another(self, held: LeasedValue) -> bool:
        return held.lease not in (0, self._lease)

    def _notify_replaced(self, other: bytes) -> None:
        if other == self._reported_value:
            return
        self._reported_value = other
        log.error("%s was taken over by another process", self.key)
        for callback in self._replaced:
            callback(other)
