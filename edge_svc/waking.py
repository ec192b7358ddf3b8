"""Hold requests for a front end whose API server starts with its first connection, until it answers."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from edge_svc.directory import Directory
from tailrace.address import MalformedAddress, parse_address

_CONNECT_S: Final = 5.0
# Held at a time: each has one of Envoy's connections to the edge.
_HELD_MAX: Final = 64


class Following(Protocol):
    """Who knows the front ends."""

    directory: Directory
    # Set with the next change of the directory, which brings another event.
    changed: asyncio.Event


class Waker:
    """Start API servers that are asleep by connecting to them."""

    def __init__(self, following: Following, wait_s: float) -> None:
        """`wait_s`: for how long a request is held."""
        self._following = following
        self._wait_s = wait_s
        self._held = 0

    async def wake(self, cluster: str) -> bool:
        """Return whether a cluster answers; if it is asleep, once it does. False: it did not in time, it has
        gone, or too many requests wait."""
        if not self._following.directory.asleep(cluster):
            return True
        if self._held >= _HELD_MAX:
            return False
        self._held += 1
        try:
            async with asyncio.timeout(self._wait_s):
                # After each change: a front end that has restarted is asleep again.
                while addresses := self._following.directory.asleep(cluster):
                    changed = self._following.changed
                    await _knock(addresses[0])
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._held -= 1
        return any(each.cluster == cluster for each in self._following.directory.clusters)


async def _knock(address: str) -> None:
    """Connect, and leave again; one that cannot be reached has gone, which the directory will say."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(*parse_address(address))
    except (OSError, MalformedAddress, TimeoutError):
        return
    writer.close()
