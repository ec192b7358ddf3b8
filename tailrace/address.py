"""Parse HOST:PORT as users write it."""

from __future__ import annotations

import ipaddress
from typing import Final

_PORT_MAX: Final = 65_535


class MalformedAddress(ValueError):
    """A text is not HOST:PORT. Its message is a hint about IPv6 addresses, or empty."""


def parse_address(text: str, min_port: int = 1) -> tuple[str, int]:
    """Parse HOST:PORT or [IPV6]:PORT; return the host without brackets, and the port.

    `min_port`: 0 where port 0 means any free one. Raise MalformedAddress.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    valid = bool(colon and host and port.isascii() and port.isdigit())
    if not valid or not min_port <= int(port) <= _PORT_MAX:
        raise MalformedAddress()
    if bracketed:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise MalformedAddress("not an IPv6 address in the brackets") from error
    elif ":" in host:
        raise MalformedAddress(f"put an IPv6 address in brackets, as in [::1]:{port}")
    return host, int(port)
