"""The certificates of a local cluster: where they are, to issue them, and to connect with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tailrace.local.ports import LOOPBACK
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport

OPERATOR: Final = Identity(Role.ADMIN, "local")
ETCD_SERVER: Final = Identity(Role.ETCD, "etcd")
ETCD_ROOT: Final = Identity(Role.ETCD_ROOT, "local")


def certificate_folder(certificates: str, role: str, name: str) -> str:
    """Return the folder of a part's certificate (tailrace/security/authority.py)."""
    return f"{certificates}/issued/{role}/{name}"


def span_certificates(folder: str) -> dict[str, str]:
    """Return the environment that gives the certificates to OpenTelemetry's exporter."""
    return {
        "OTEL_EXPORTER_OTLP_CERTIFICATE": f"{folder}/{AUTHORITIES}",
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": f"{folder}/{CERTIFICATE}",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": f"{folder}/{KEY}",
    }


def issue_certificates(certificates: str, members: Iterable[Identity]) -> None:
    """Create an authority in this folder; issue certificates for the members, the operator and etcd's root
    user."""
    # Imported here, since using certificates needs no signing library.
    from tailrace.security.authority import Authority

    authority = Authority.create(Path(certificates))
    certify(certificates, members)
    for identity in (OPERATOR, ETCD_ROOT):
        authority.issue(identity)


def certify(certificates: str, members: Iterable[Identity]) -> None:
    """Issue certificates for more members by the authority in this folder."""
    from tailrace.security.authority import Authority

    authority = Authority.load(Path(certificates))
    for member in members:
        authority.issue(member, hosts=[LOOPBACK])


def transport_of(certificates: str, identity: Identity) -> Transport:
    """Return the transport of `identity` to the cluster's parts; unencrypted if `certificates` is empty."""
    if not certificates:
        return PLAIN
    folder = certificate_folder(certificates, identity.role.value, identity.name)
    return TlsTransport(CredentialFolder(Path(folder), frozenset({identity.role})))
