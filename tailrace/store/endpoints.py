"""Parse etcd endpoints as given by an operator."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.address import MalformedAddress, parse_address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a member listens for clients. `host`: a name, an IPv4 or an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
