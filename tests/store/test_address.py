"""Parsing of HOST:PORT."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.address import MalformedAddress, parse_address


@given(host=st.ip_addresses(v=6), port=st.integers(1, 65_535))
def test_an_ipv6_address_needs_brackets(host: ipaddress.IPv6Address, port: int) -> None:
    assert parse_address(f"[{host}]:{port}") == (str(host), port)
    with pytest.raises(MalformedAddress, match=rf"in brackets, as in \[::1\]:{port}"):
        parse_address(f"{host}:{port}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:-1",
        "a:65536",
        "a:0",
        "a:²",
        "a:1 ",
        "a:" + "9" * 9_999,
        "10.0.0.256:1",
        "1.2.3:1",
    ],
)
def test_anything_else_is_malformed(text: str) -> None:
    with pytest.raises(MalformedAddress):
        parse_address(text)


def test_port_0_is_accepted_where_it_means_any_free_port() -> None:
    assert parse_address("[::]:0", min_port=0) == ("::", 0)
