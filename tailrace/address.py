"""Addresses as users write them: HOST:PORT, and the endpoints of etcd."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_PORT_MAX: Final = 65_535


class MalformedAddress(ValueError):
    """A text is not HOST:PORT. Its message says what is wrong with the host or the port, or is empty."""


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets: the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, min_port: int = 1) -> tuple[str, int]:
    """Parse HOST:PORT or [IPV6]:PORT; return the host without brackets, and the port.

    `min_port`: 0 where port 0 means any free one. Raise MalformedAddress.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not (colon and host and port.isascii() and port.isdigit()):
        raise MalformedAddress()
    # Python refuses to read thousands of digits.
    if len(port) > len(str(_PORT_MAX)) or not min_port <= int(port) <= _PORT_MAX:
        raise MalformedAddress(f"port {port[:10]} is not from {min_port} to {_PORT_MAX}")
    if bracketed:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise MalformedAddress("not an IPv6 address in the brackets") from error
    elif ":" in host:
        raise MalformedAddress(f"put an IPv6 address in brackets, as in [::1]:{port}")
    elif not_ipv4(host):
        raise MalformedAddress(f"{host[:100]} is no IPv4 address")
    return host, int(port)


def is_ip(host: str) -> bool:
    """Return whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def not_ipv4(host: str) -> bool:
    """Return whether this looks like an IPv4 address and is none: no name has digits and dots alone."""
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)+", host)) and not is_ip(host)


def listen_address(host: str) -> str:
    """Return the address on which a host listens that others reach by this name or address."""
    return host if is_ip(host) else "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a member listens for clients. `host`: a name, an IPv4 or an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)

    @property
    def target(self) -> str:
        """Return the endpoint as a gRPC target. gRPC resolves a host name again at each reconnect."""
        try:
            version = ipaddress.ip_address(self.host.partition("%")[0]).version
        except ValueError:
            return f"dns:///{self}"
        return f"ipv{version}:{self}"


def parse_endpoint(text: str) -> Endpoint:
    """Parse HOST:PORT or [IPV6]:PORT. Raise ValueError that says what is expected."""
    if "://" in text:
        raise ValueError(f"etcd endpoint {text!r}: HOST:PORT expected, without {text.partition('://')[0]}://")
    try:
        return Endpoint(*parse_address(text))
    except MalformedAddress as error:
        raise ValueError(f"etcd endpoint {text!r}: {str(error) or 'HOST:PORT expected'}") from error


def parse_endpoints(texts: Iterable[str]) -> list[Endpoint]:
    """Parse several, dropping duplicates. Raise ValueError, also if there is none."""
    endpoints = list(dict.fromkeys(map(parse_endpoint, texts)))
    if not endpoints:
        raise ValueError("no etcd endpoint given")
    return endpoints
