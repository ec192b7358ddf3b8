"""Hosts that front ends name become addresses."""

from __future__ import annotations

import asyncio
import socket

import pytest

from edge_svc.configuration import Endpoints
from edge_svc.names import Names


async def test_a_host_keeps_its_address_while_nobody_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a.example": "10.0.0.1"}

    async def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    names = Names()
    addresses = ("a.example:1", "b.example:2", "10.0.0.9:3", "[fd00::1]:4")
    given = [Endpoints("c", addresses, frozenset(addresses[:2]))]
    (found,) = await names.resolved(given)
    assert found.addresses == ("10.0.0.1:1", "10.0.0.9:3", "[fd00::1]:4")
    assert found.https == {"10.0.0.1:1"}
    assert names.missing == {"b.example"}
    known = {"b.example": "10.0.0.2"}
    (found,) = await names.resolved(given)
    assert found.addresses == ("10.0.0.1:1", "10.0.0.2:2", "10.0.0.9:3", "[fd00::1]:4")
    assert not names.missing
