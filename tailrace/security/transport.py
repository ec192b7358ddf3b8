"""How this process reaches others and is reached: in the clear, or with certificates on both sides."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import grpc

from tailrace.security.folder import CredentialFolder
from tailrace.security.guard import Guard
from tailrace.security.roles import Role, server_name
from tailrace.security.session import TlsSession

ChannelOptions = Sequence[tuple[str, str | int]]


class Transport(Protocol):
    """One process's. Whatever connects or listens asks it: nothing is left in the clear by mistake."""

    @property
    def encrypted(self) -> bool:
        """Whether both ends prove themselves by certificates."""

    @property
    def version(self) -> int:
        """Changes with this process's certificate: channels made before show the older one."""

    def channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to a process of that role."""

    def blocking_channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.Channel:
        """The same, for callers without an event loop."""

    def etcd_channel(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to an etcd member, which is known by its host name."""

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen on HOST:PORT; the port. Raises RuntimeError when it cannot."""

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """What checks each call to a server."""

    def accept(self) -> TlsSession | None:
        """The server's end of a new connection; None: it is in the clear."""

    def dial(self, role: Role) -> TlsSession | None:
        """The client's end of a new connection to a process of that role; None: it is in the clear."""

    def https(self) -> ssl.SSLContext | None:
        """For an HTTP server; None: it is in the clear. Asked for each connection."""


class PlainTransport:
    """In the clear, and whoever connects may do everything: for loopback, and for trusted networks."""

    encrypted: Final = False
    version: Final = 0

    def channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options)

    def blocking_channel(self, address: str, role: Role, options: ChannelOptions) -> grpc.Channel:
        return grpc.insecure_channel(address, options=options)

    def etcd_channel(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=options)

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
    """Mutual TLS 1.3. A new certificate is shown on every connection made after its files have changed."""

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
        return grpc.aio.secure_channel(target, self.folder.current().for_channels(), options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        configuration = _ServerConfiguration(self.folder)
        credentials = grpc.dynamic_ssl_server_credentials(
            configuration.first,
            # Its stubs do not know that None means: as before.
            cast(Callable[[], grpc.ServerCertificateConfiguration], configuration.fetch),
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        return (Guard(),)

    def accept(self) -> TlsSession | None:
        return TlsSession.server(self.folder.current().server_context)

    def dial(self, role: Role) -> TlsSession | None:
        return TlsSession.client(self.folder.current().client_context, server_name(role))

    def https(self) -> ssl.SSLContext | None:
        return self.folder.current().server_context


class _ServerConfiguration:
    """What gRPC asks before each handshake, on threads of its own."""

    def __init__(self, folder: CredentialFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._version, credentials = folder.versioned()
        self.first = credentials.for_server()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as before."""
        version, credentials = self._folder.versioned()
        with self._lock:
            if version == self._version:
                return None
            self._version = version
        return credentials.for_server()


def _named(options: ChannelOptions, role: Role) -> ChannelOptions:
    return [*options, ("grpc.ssl_target_name_override", server_name(role))]
