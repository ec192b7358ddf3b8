"""Roles, and the identity (role and name) that a certificate carries."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_SCHEME: Final = "tailrace://"
_DOMAIN: Final = "tailrace.internal"
# Also a folder's name, and so not "." or "..".
_NAME: Final = re.compile(r"(?!\.+\Z)[A-Za-z0-9._@-]{1,100}")


class Role(enum.StrEnum):
    """The rights that a certificate grants."""

    # Members: the services of the cluster.
    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    MONITOR = "monitor"
    MIGRATION = "migration"
    WORKER = "worker"
    EDGE = "edge"
    # Operators: people and their tools, at the admin API.
    VIEWER = "viewer"
    ADMIN = "admin"
    # Prometheus and trace collectors.
    TELEMETRY = "telemetry"
    # etcd's members, and the client that administers etcd's users and roles.
    ETCD = "etcd"
    ETCD_ROOT = "etcd-root"


MEMBERS: Final = frozenset(
    {Role.FRONTEND, Role.SCHEDULER, Role.MONITOR, Role.MIGRATION, Role.WORKER, Role.EDGE}
)
OPERATORS: Final = frozenset({Role.VIEWER, Role.ADMIN})


class NoIdentity(ValueError):
    """A certificate carries no Tailrace identity, or more than one; the message says which."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A role and the name of its holder. Several processes may share a name; access depends on the role
    alone."""

    role: Role
    name: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise NoIdentity(
                f"{self.name!r}: 1 to 100 letters, digits and ._@-, not dots alone, expected as a name"
            )

    def __str__(self) -> str:
        return f"{self.role.value}/{self.name}"

    @property
    def uri(self) -> str:
        """Return the identity as a URI for the certificate's subject alternative names."""
        return f"{_SCHEME}{self}"


def identity_of(uris: Iterable[str]) -> Identity:
    """Return the one identity among a certificate's URIs. Raise NoIdentity."""
    role_uris = [uri.removeprefix(_SCHEME) for uri in uris if uri.startswith(_SCHEME)]
    if len(role_uris) != 1:
        raise NoIdentity(f"the certificate has {len(role_uris) or 'no'} names of the form {_SCHEME}ROLE/NAME")
    role, _, name = role_uris[0].partition("/")
    try:
        return Identity(Role(role), name)
    except NoIdentity:
        raise
    except ValueError:
        raise NoIdentity(f"the certificate has an unknown role {role!r}") from None


def server_name(role: Role) -> str:
    """Return the DNS name in the certificate of every server of the role, wherever it listens.

    Clients verify it in place of a host name: members come and go on any host and port, and a client needs to
    know only that the server holds the role.
    """
    return f"{role.value}.{_DOMAIN}"


def etcd_user(role: Role) -> str:
    """Return the common name of the role's certificates, which is its user name in etcd."""
    return "root" if role is Role.ETCD_ROOT else f"tailrace-{role.value}"
