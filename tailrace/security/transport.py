"""How this process opens and accepts connections: unencrypted, or with mutual TLS."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import grpc

from tailrace.security.access import AccessInterceptor
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Role, server_name
from tailrace.security.session import TlsSession

ChannelOptions = Sequence[tuple[str, str | int]]

DIRECT: Final = ("grpc.enable_http_proxy", 0)
"""Channel option: connect directly, whatever proxy the environment names for the world outside."""


class Transport(Protocol):
    """A process's only way to connect and to listen, so that no connection is left unencrypted by mistake."""

    @property
    def encrypted(self) -> bool:
        """Return whether connections use mutual TLS."""

    @property
    def version(self) -> int:
        """Return a number that changes with this process's certificate; older channels still present the old
        one."""

    def channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.aio.Channel:
        """Return a channel to a process of the given role at HOST:PORT."""

    def blocking_channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.Channel:
        """Return a synchronous channel, for callers without an event loop."""

    def etcd_channel(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        """Return a channel to an etcd member, whose certificate carries its host name and not a role."""

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Make a server listen on HOST:PORT and return the port. Raise RuntimeError on failure."""

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Return the interceptors that authorize each call to a server."""

    def accept(self) -> TlsSession | None:
        """Return the server's TLS session of a new connection, or None when unencrypted."""

    def dial(self, role: Role) -> TlsSession | None:
        """Return the client's TLS session of a new connection to a process of that role, or None when
        unencrypted."""

    def https(self) -> ssl.SSLContext | None:
        """Return the context of an HTTP server, or None when unencrypted. Called for each connection."""


class PlainTransport:
    """Unencrypted and unauthenticated, for loopback and trusted networks only."""

    encrypted: Final = False
    version: Final = 0

    def channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=[*options, DIRECT])

    def blocking_channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.Channel:
        return grpc.insecure_channel(address, options=[*options, DIRECT])

    def etcd_channel(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=[*options, DIRECT])

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_insecure_port(address)

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        return ()

    def accept(self) -> TlsSession | None:
        return None

    def dial(self, role: Role) -> TlsSession | None:
        return None

    def https(self) -> ssl.SSLContext | None:
        return None


PLAIN: Final = PlainTransport()


class TlsTransport:
    """Mutual TLS 1.3. Connections made after the certificate's files changed present the new certificate."""

    encrypted: Final = True

    def __init__(self, folder: CredentialFolder) -> None:
        self.folder = folder

    @property
    def version(self) -> int:
        return self.folder.versioned()[0]

    def channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address, self.folder.current().for_channels(), options=_named(options, role)
        )

    def blocking_channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.Channel:
        return grpc.secure_channel(
            address, self.folder.current().for_channels(), options=_named(options, role)
        )

    def etcd_channel(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        current = self.folder.current()
        credentials = (current.etcd or current).for_channels()
        return grpc.aio.secure_channel(target, credentials, options=[*options, DIRECT])

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        configuration = _ServerConfiguration(self.folder)
        credentials = grpc.dynamic_ssl_server_credentials(
            configuration.first,
            # gRPC's stubs omit None, which means unchanged.
            cast(Callable[[], grpc.ServerCertificateConfiguration], configuration.fetch),
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        return (AccessInterceptor(),)

    def accept(self) -> TlsSession | None:
        return TlsSession.server(self.folder.current().server_context)

    def dial(self, role: Role) -> TlsSession | None:
        return TlsSession.client(self.folder.current().client_context, server_name(role))

    def https(self) -> ssl.SSLContext | None:
        return self.folder.current().server_context


class _ServerConfiguration:
    """Serves gRPC's request for the configuration before each handshake, on gRPC's own threads."""

    def __init__(self, folder: CredentialFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._version, credentials = folder.versioned()
        self.first = credentials.for_server()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, or None when it has not changed."""
        version, credentials = self._folder.versioned()
        with self._lock:
            if version == self._version:
                return None
            self._version = version
        return credentials.for_server()


def _named(options: ChannelOptions, role: Role) -> ChannelOptions:
    return [*options, DIRECT, ("grpc.ssl_target_name_override", server_name(role))]
