"""Ports for the parts of a local cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tailrace.local.ports import LOOPBACK, PortUnavailable, free_ports, require_free


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server((LOOPBACK, port)):
            pass


def test_free_ports_are_below_the_ephemeral_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_ports(50)) < first


def test_too_many_ports_are_an_error() -> None:
    with pytest.raises(PortUnavailable, match="of 20000 ports"):
        free_ports(20_000)


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_a_port_in_use_is_an_error_with_a_hint(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable, match=f"port {port} .* is in use; .*--port"):
            require_free(host, port)
    require_free(host, port)
