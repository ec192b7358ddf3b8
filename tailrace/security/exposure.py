"""Whether an address that a service listens on can be reached from elsewhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is this machine's alone. A name counts only if it is `localhost`."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposed(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses that others can reach."""
    return [address for address in addresses if not is_loopback(address)]
