"""Why a server does not take our certificate, or we not its own: gRPC tells no more than `Socket closed`."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from tailrace.security.credentials import Credentials, client_context
from tailrace.security.refusals import refusal
from tailrace.security.roles import Role, server_name

_CONNECT_S: Final = 2.0
_NOT_TAKEN: Final = (
    "the server closes the connection at the sight of our certificate: it trusts another authority, or the "
    "certificate has expired"
)


def handshake_problem(address: str, role: Role, credentials: Credentials) -> str:
    """Connect to a gRPC server of the role at HOST:PORT once more and see; empty: nothing is wrong with
    certificates. Takes some seconds at most."""
    host, _, port = address.rpartition(":")
    context = client_context(credentials.authorities, credentials.certificate, credentials.key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection,
            context.wrap_socket(connection, server_hostname=server_name(role)) as tls,
        ):
            # Whether it takes our certificate shows in what it says first; gRPC's closes without an alert.
            return "" if _says_something(tls) else _NOT_TAKEN
    except ssl.SSLError as error:
        return refusal(error)
    except (OSError, ValueError):
        return ""


def _says_something(tls: ssl.SSLSocket) -> bool:
    try:
        return tls.recv(1) != b""
    except ConnectionResetError:
        return False
