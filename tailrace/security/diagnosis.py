"""Find out why a TLS handshake with a gRPC server failed: gRPC itself reports only `Socket closed`."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from tailrace.security.credentials import Credentials, client_context
from tailrace.security.refusals import refusal
from tailrace.security.roles import Role, server_name

_CONNECT_S: Final = 2.0
_REJECTED: Final = (
    "the server rejects our certificate: it trusts another authority, or the certificate has expired"
)


def handshake_problem(address: str, role: Role, credentials: Credentials) -> str:
    """Return why the handshake with a gRPC server at HOST:PORT fails, or an empty string.

    Opens a new TLS connection to the server of the given role. Blocks for a few seconds at most; an empty
    result means that certificates are not the cause.
    """
    host, _, port = address.rpartition(":")
    context = client_context(credentials.authorities, credentials.certificate, credentials.key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection,
            context.wrap_socket(connection, server_hostname=server_name(role)) as tls,
        ):
            # With TLS 1.3 the server's verdict on our certificate arrives after the handshake; gRPC closes
            # without an alert.
            return "" if _receives_data(tls) else _REJECTED
    except ssl.SSLError as error:
        return refusal(error)
    except (OSError, ValueError):
        return ""


def _receives_data(tls: ssl.SSLSocket) -> bool:
    try:
        return tls.recv(1) != b""
    except ConnectionResetError:
        return False
