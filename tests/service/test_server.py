"""A gRPC server that cannot listen reports the reason."""

from __future__ import annotations

import socket

import pytest

from tailrace.service.server import serve_grpc
from tailrace.service.sockets import ListenError


async def _listen_error(listen: str) -> str:
    with pytest.raises(ListenError) as raised:
        async with serve_grpc(listen, []):
            raise AssertionError(f"it listens on {listen}")
    return str(raised.value)


async def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert await _listen_error(listen) == f"--listen: cannot listen on {listen}: the port is taken"


async def test_an_address_of_another_machine() -> None:
    # 192.0.2.0/24 is reserved for documentation.
    assert (await _listen_error("192.0.2.1:0")).endswith("this machine does not have that address")


async def test_a_name_that_does_not_resolve() -> None:
    error = await _listen_error("nobody.invalid:0")
    assert error.startswith("--listen: cannot listen on nobody.invalid:0: ")
