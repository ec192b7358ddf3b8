"""The certificates of a local cluster: to issue them, and to connect with them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tailrace.local.plan import Plan, certificate_folder
from tailrace.local.ports import LOOPBACK
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport

OPERATOR: Final = Identity(Role.ADMIN, "local")
ETCD_ROOT: Final = Identity(Role.ETCD_ROOT, "local")


def issue_certificates(plan: Plan) -> None:
    """Create an authority, and issue certificates for each part, the operator and etcd's root user."""
    if not plan.certificates:
        return
    # Imported here, since using certificates needs no signing library.
    from tailrace.security.authority import Authority

    authority = Authority.create(Path(plan.certificates))
    for part in plan.parts:
        authority.issue(Identity(Role(part.role), part.name), hosts=[LOOPBACK])
    for identity in (OPERATOR, ETCD_ROOT):
        authority.issue(identity)


def transport_of(certificates: str, identity: Identity) -> Transport:
    """Return the transport of `identity` to the cluster's parts; unencrypted if `certificates` is empty."""
    if not certificates:
        return PLAIN
    folder = certificate_folder(certificates, identity.role.value, identity.name)
    return TlsTransport(CredentialFolder(Path(folder), frozenset({identity.role})))
