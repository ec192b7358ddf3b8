"""The client certificates of a local cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tailrace.local.plan import certificate_folder
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport

OPERATOR: Final = Identity(Role.ADMIN, "local")
ETCD_ROOT: Final = Identity(Role.ETCD_ROOT, "local")


def transport_of(certificates: str, identity: Identity) -> Transport:
    """Return the transport of `identity` to the cluster's parts; unencrypted if `certificates` is empty."""
    if not certificates:
        return PLAIN
    folder = certificate_folder(certificates, identity.role.value, identity.name)
    return TlsTransport(CredentialFolder(Path(folder), frozenset({identity.role})))
