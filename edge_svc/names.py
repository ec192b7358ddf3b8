"""Addresses of hosts that front ends name: Envoy's endpoints are addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from edge_svc.configuration import Endpoints
from tailrace.address import format_address, is_ip, parse_address

log = logging.getLogger(__name__)

_RESOLVE_S: Final = 5.0


class Names:
    """Resolve hosts. While one cannot be resolved, it has the address that it had last."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        # Those that have no address at the moment.
        self.missing: frozenset[str] = frozenset()

    async def resolved(self, every: Sequence[Endpoints]) -> list[Endpoints]:
        """Return the endpoints with addresses in place of names, without those that have none."""
        hosts = {parse_address(address)[0] for each in every for address in each.addresses}
        names = sorted(host for host in hosts if not is_ip(host))
        found = await asyncio.gather(*map(self._look_up, names))
        self._known = {name: address for name, address in zip(names, found, strict=True) if address}
        missing = frozenset(names) - self._known.keys()
        if missing - self.missing:
            log.error("front ends on %s get no requests: no such host", ", ".join(sorted(missing)))
        self.missing = missing
        return [
            replace(each, addresses=self._of(each.addresses), https=frozenset(self._of(each.https)))
            for each in every
        ]

    async def _look_up(self, name: str) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            return self._known.get(name, "")
        return str(found[0][4][0])

    def _of(self, addresses: Iterable[str]) -> tuple[str, ...]:
        pairs = [parse_address(address) for address in addresses]
        known = [(host if is_ip(host) else self._known.get(host, ""), port) for host, port in pairs]
        return tuple(dict.fromkeys(format_address(host, port) for host, port in known if host))
