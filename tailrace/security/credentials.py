"""A process's TLS credentials: its certificate and key, and the authorities it trusts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc

from tailrace.security.refusals import refusal
from tailrace.security.roles import Identity, NoIdentity, identity_of

AUTHORITIES: Final = "ca.crt"
"""PEM certificates of the trusted authorities; two of them while one replaces the other."""
CERTIFICATE: Final = "tls.crt"
"""PEM certificate, followed by intermediate ones if there are any."""
KEY: Final = "tls.key"
"""Its PEM private key, not encrypted."""
FOR_ETCD: Final = "etcd"
"""Subfolder with a member's credentials towards etcd, of etcd's authority; without it, the others serve."""


class UnusableCredentials(Exception):
    """A folder's credentials cannot be used; the message says which file, and why."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The content of a credentials folder at one time, verified as a peer would verify it."""

    identity: Identity
    # Seconds since the Unix epoch.
    not_before_s: float
    not_after_s: float
    authorities: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    # For accepting and for connecting; both verify the peer's certificate.
    server_context: ssl.SSLContext = field(repr=False)
    client_context: ssl.SSLContext = field(repr=False)
    # Those towards etcd, if they differ.
    etcd: Credentials | None = None

    @property
    def end_s(self) -> float:
        """Return when the first of the certificates ends, in seconds since the Unix epoch."""
        return self.not_after_s if self.etcd is None else min(self.not_after_s, self.etcd.not_after_s)

    def for_channels(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC client."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Return the configuration of a gRPC server."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authorities)


def read_credentials(folder: Path) -> Credentials:
    """Read `ca.crt`, `tls.crt` and `tls.key` (Kubernetes's names for them), and the subfolder for etcd.

    Raise UnusableCredentials.
    """
    own = _read_set(folder)
    if not (folder / FOR_ETCD).is_dir():
        return own
    etcd = _read_set(folder / FOR_ETCD)
    if etcd.identity.role is not own.identity.role:
        raise UnusableCredentials(
            f"{folder / FOR_ETCD / CERTIFICATE}: its role is {etcd.identity.role.value}, not "
            f"{own.identity.role.value}"
        )
    return replace(own, etcd=etcd)


def _read_set(folder: Path) -> Credentials:
    try:
        authorities, certificate, key = (
            (folder / name).read_bytes() for name in (AUTHORITIES, CERTIFICATE, KEY)
        )
    except OSError as error:
        raise UnusableCredentials(f"{error.filename}: {error.strerror}") from error
    try:
        server = _server_context(authorities, certificate, key)
        client = client_context(authorities, certificate, key)
        # Run a handshake in memory: the verdict on our own certificate is the one every peer will reach.
        verified = _as_peer_sees_it(server, certificate, key)
        identity = identity_of(uris_of(verified))
    except ssl.SSLCertVerificationError as error:
        raise UnusableCredentials(f"{folder / CERTIFICATE}: {refusal(error)}") from error
    except ssl.SSLError as error:
        raise UnusableCredentials(f"{folder}: {_loading_problem(error)}") from error
    except (NoIdentity, ValueError) as error:
        raise UnusableCredentials(f"{folder / CERTIFICATE}: {error}") from error
    from_s, until_s = (ssl.cert_time_to_seconds(str(verified[name])) for name in ("notBefore", "notAfter"))
    return Credentials(identity, from_s, until_s, authorities, certificate, key, server, client)


def uris_of(certificate: Mapping[str, object]) -> list[str]:
    """Return the URIs among the subject alternative names that SSLObject.getpeercert() returned."""
    names = certificate.get("subjectAltName", ())
    if not isinstance(names, tuple):
        return []
    return [value for kind, value in names if kind == "URI"]


def client_context(authorities: bytes, certificate: bytes, key: bytes) -> ssl.SSLContext:
    """Return the context of a connecting end. Raise ssl.SSLError, ValueError."""
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), authorities, certificate, key)


def _server_context(authorities: bytes, certificate: bytes, key: bytes) -> ssl.SSLContext:
    context = _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authorities, certificate, key)
    # Connections are long-lived and are never resumed, so session tickets would be wasted.
    context.num_tickets = 0
    return context


def _filled(context: ssl.SSLContext, authorities: bytes, certificate: bytes, key: bytes) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authorities.decode("ascii"))
    load_chain(context, certificate, key)
    return context


def load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load the certificate and key from memory. Raise ssl.SSLError, ValueError.

    The ssl module reads files only, so write both to one memory file: they then come from the same read.
    """
    descriptor = os.memfd_create("tailrace-certificate", os.MFD_CLOEXEC)
    with open(descriptor, "wb", buffering=0) as file:
        file.write(certificate + b"\n" + key)
        # Without a password, OpenSSL would prompt on the terminal for an encrypted key.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")


def _as_peer_sees_it(server: ssl.SSLContext, certificate: bytes, key: bytes) -> Mapping[str, object]:
    """Return the certificate as a server verifies it. Raise ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    load_chain(context, certificate, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server_side, client, server_side):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return server_side.getpeercert() or {}


def _loading_problem(error: ssl.SSLError) -> str:
    match error.reason:
        case "KEY_VALUES_MISMATCH":
            return f"{KEY} is not the key of {CERTIFICATE}"
        case "NO_START_LINE" | "BAD_END_LINE" | "BAD_BASE64_DECODE" | None:
            return f"{AUTHORITIES}, {CERTIFICATE} or {KEY} is not PEM"
        case "BAD_DECRYPT" | "BAD_PASSWORD_READ":
            return f"{KEY} is encrypted; it must not be"
        case _:
            return refusal(error)
