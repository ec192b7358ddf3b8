"""`python -m tests.strangers.calls HOST PORT,..`: call every method on every port; JSON on stdout.

Calls are made without TLS, with TLS but no certificate, and with each of the given certificates.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc

from tailrace.security.access import METHODS
from tailrace.security.credentials import read_credentials
from tailrace.security.roles import MEMBERS, server_name

_CALL_S: Final = 5.0
_CONNECT_S: Final = 2.0

IN_THE_CLEAR: Final = "in the clear"
NO_CERTIFICATE: Final = "TLS, no certificate"


def call_all(
    host: str, port: int, credentials: grpc.ChannelCredentials | None, name: str = ""
) -> dict[str, str]:
    """Call every method of the table; return the status by method, OK if there was any reply.

    `credentials` None: no TLS. `name`: expected in the server's certificate, in place of the host's.
    """
    address = f"{host}:{port}"
    options = [("grpc.ssl_target_name_override", name)] if name else []
    channel = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=options)
    )
    with channel:
        calls = {}
        for method in METHODS:
            call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
            calls[method] = call(iter([b""]), timeout=_CALL_S)
        ends: dict[str, str] = {}
        for method, stream in calls.items():
            try:
                next(iter(stream), None)
                ends[method] = "OK"
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                ends[method] = error.code().name
            stream.cancel()
    return ends


def http_get(host: str, port: int, path: str, timeout_s: float = _CONNECT_S) -> str:
    """Return the first line of the reply, empty if there is none."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(100).decode("latin-1").partition("\r\n")[0]
    except OSError:
        return ""


def _reached(ends: Mapping[str, str]) -> int:
    return sum(end != "UNAVAILABLE" for end in ends.values())


def main() -> int:
    """Call everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("ports", help="comma-separated")
    parser.add_argument("--authorities", type=Path, required=True, help="ca.crt of the cluster")
    parser.add_argument(
        "--certificate", type=Path, action="append", default=[], help="folder; can be repeated"
    )
    parser.add_argument(
        "--users-port",
        type=int,
        action="append",
        default=[],
        help="port of users' API: GET models, not metrics; can be repeated",
    )
    options = parser.parse_args()
    authorities = options.authorities.read_bytes()
    # The server's role is unknown; etcd's certificate names its host.
    names = ("", *map(server_name, sorted(MEMBERS)))
    ways: dict[str, tuple[grpc.ChannelCredentials | None, tuple[str, ...]]] = {
        IN_THE_CLEAR: (None, ("",)),
        NO_CERTIFICATE: (grpc.ssl_channel_credentials(authorities), names),
    }
    for folder in options.certificate:
        credentials = read_credentials(folder)
        ways[credentials.identity.role.value] = (credentials.for_channels(), names)
    found: dict[str, dict[str, Mapping[str, str] | str]] = {}
    for port in map(int, options.ports.split(",")):
        path = "/v1/models" if port in options.users_port else "/metrics"
        found[str(port)] = {f"GET {path}": http_get(options.host, port, path)}
        for way, (channel_credentials, server_names) in ways.items():
            # Keep the name with which most calls were answered.
            attempts = [call_all(options.host, port, channel_credentials, name) for name in server_names]
            found[str(port)][way] = max(attempts, key=_reached)
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
