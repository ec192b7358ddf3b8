"""A gRPC server that cannot listen says why."""

from __future__ import annotations

import socket

import pytest

from tailrace.service.listening import ListenError
from tailrace.service.server import serve_grpc


async def _refusal(listen: str) -> str:
    with pytest.raises(ListenError) as raised:
        async with serve_grpc(listen, []):
            raise AssertionError(f"it listens on {listen}")
    return str(raised.value)


async def test_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert await _refusal(listen) == f"--listen: cannot listen on {listen}: the port is taken"


async def test_an_address_of_another_machine() -> None:
    # 192.0.2.0/24 is reserved for documentation.
    assert (await _refusal("192.0.2.1:0")).endswith("this machine does not have that address")


async def test_a_name_that_does_not_resolve() -> None:
    assert (await _refusal("nobody.invalid:0")).startswith("--listen: cannot listen on nobody.invalid:0: ")
