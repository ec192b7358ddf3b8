"""Set up etcd's users and roles: one of each per Tailrace role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import grpc

from tailrace.security.roles import MEMBERS, Role, etcd_user
from tailrace.store.client import EtcdClient, Rejected
from tailrace.store.etcd_api import (
    AUTH_ENABLE,
    ROLE_ADD,
    ROLE_GET,
    ROLE_GRANT,
    ROLE_REVOKE,
    USER_ADD,
    USER_GET,
    USER_GRANT_ROLE,
    Method,
    Reply,
    Request,
    prefix_end,
)
from tailrace.store.store import clusters_below
from tailrace.v1 import etcd_pb2

# The keys that a service holds by a lease, and the markers of its withdrawal.
_SERVICE: Final = ("services/{role}/", "withdrawn/services/{role}/", "leader/{role}")

_WRITES: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.EDGE: _SERVICE[:2],
        Role.FRONTEND: (*_SERVICE[:2], "adapters/"),
        Role.MONITOR: _SERVICE,
        Role.MIGRATION: _SERVICE,
        Role.SCHEDULER: (*_SERVICE, "pools/", "stages", "policy", "slo", "drains/", "rollouts/"),
        Role.WORKER: ("instances/", "withdrawn/instances/", "profiles/", "profiling/"),
    }
)

_READ_BELOW: Final = (Role.EDGE, Role.SCHEDULER)

REVISION_KEY: Final = "/tailrace"
"""A key that never exists; a read of it returns etcd's current revision."""


@dataclass(frozen=True, slots=True)
class Rights:
    """One role's rights in one cluster. Keys that end in `/` or `.` are prefixes."""

    role: Role
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def etcd_rights(cluster: str) -> list[Rights]:
    """Return the rights of every role that uses etcd.

    Every member reads the whole cluster, because it follows membership, pools, stages, policy and SLOs.
    Edges and schedulers read the clusters that belong to this one, too. Prompts are never stored in etcd.
    """
    prefix = f"{REVISION_KEY}/{cluster}/"
    return [
        Rights(
            role,
            (REVISION_KEY, prefix, *([clusters_below(prefix)] if role in _READ_BELOW else [])),
            tuple(prefix + key.format(role=role.value) for key in _WRITES[role]),
        )
        for role in sorted(MEMBERS)
    ]


_ROOT = etcd_user(Role.ETCD_ROOT)

_Span = tuple[bytes, bytes]

# How etcd's errors end that refuse a change because it has been made.
_MADE: Final = (
    "user name already exists",
    "role name already exists",
    "permission is not granted to the role",
)


async def apply_rights(client: EtcdClient, rights: Iterable[Rights], cluster: str) -> list[str]:
    """Create or correct users, roles and permissions, and enable etcd's authentication.

    Return one line per change; none if nothing had to change. Once authentication is enabled, the client must
    be root's. Raise StoreUnavailable or Rejected.
    """
    changes: list[str] = []
    changes += await _ensure_user(client, _ROOT, "root")
    for role_rights in rights:
        role = role_name(role_rights.role, cluster)
        changes += await _ensure_role(client, role, role_rights)
        changes += await _ensure_user(client, etcd_user(role_rights.role), role)
    await client.call(AUTH_ENABLE, etcd_pb2.AuthEnableRequest(), "enable authentication")
    return changes


def role_name(role: Role, cluster: str) -> str:
    """Return the name of a role in etcd, which several clusters may share."""
    return f"tailrace-{cluster}-{role.value}"


async def _ensure_user(client: EtcdClient, user: str, role: str) -> Iterable[str]:
    """Create user and role where missing, and grant the role to the user; return one line per change."""
    changes = []
    present = await _get_or_none(
        client, USER_GET, etcd_pb2.AuthUserGetRequest(name=user), f"look up user {user}"
    )
    if present is None:
        options = etcd_pb2.UserAddOptions(no_password=True)
        request = etcd_pb2.AuthUserAddRequest(name=user, options=options)
        await _change(client, USER_ADD, request, f"add user {user}")
        changes.append(f"user {user} added")
    if (
        await _get_or_none(client, ROLE_GET, etcd_pb2.AuthRoleGetRequest(role=role), f"look up role {role}")
        is None
    ):
        await _change(client, ROLE_ADD, etcd_pb2.AuthRoleAddRequest(name=role), f"add role {role}")
        changes.append(f"role {role} added")
    if present is None or role not in present.roles:
        grant = etcd_pb2.AuthUserGrantRoleRequest(user=user, role=role)
        await client.call(USER_GRANT_ROLE, grant, f"give {user} the role {role}")
        changes.append(f"role {role} given to user {user}")
    return changes


async def _ensure_role(client: EtcdClient, role: str, rights: Rights) -> list[str]:
    """Create the role if it is missing, and give it exactly these permissions; return one line per change."""
    changes = []
    present = await _get_or_none(
        client, ROLE_GET, etcd_pb2.AuthRoleGetRequest(role=role), f"look up role {role}"
    )
    if present is None:
        await _change(client, ROLE_ADD, etcd_pb2.AuthRoleAddRequest(name=role), f"add role {role}")
        changes.append(f"role {role} added")
    required = {(key, end): kind for key, end, kind in _permissions(rights)}
    granted: dict[_Span, etcd_pb2.Permission.Type.ValueType] = {}
    if present is not None:
        granted = {(perm.key, perm.range_end): perm.perm_type for perm in present.perm}
    for (key, end), kind in required.items():
        if granted.get((key, end)) != kind:
            perm = etcd_pb2.Permission(perm_type=kind, key=key, range_end=end)
            grant = etcd_pb2.AuthRoleGrantPermissionRequest(name=role, perm=perm)
            await client.call(ROLE_GRANT, grant, f"grant {role} {key.decode()}")
            changes.append(f"role {role}: {_kind_name(kind)} {key.decode()}")
    for key, end in granted.keys() - required.keys():
        revoke = etcd_pb2.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=end)
        await _change(client, ROLE_REVOKE, revoke, f"revoke from {role} {key.decode(errors='replace')}")
        changes.append(f"role {role}: no longer {key.decode(errors='replace')}")
    return changes


def _permissions(rights: Rights) -> Iterator[tuple[bytes, bytes, etcd_pb2.Permission.Type.ValueType]]:
    for keys, kind in (
        (rights.reads, etcd_pb2.Permission.READ),
        (rights.writes, etcd_pb2.Permission.READWRITE),
    ):
        for key in keys:
            yield key.encode(), prefix_end(key.encode()) if key.endswith(("/", ".")) else b"", kind


def _kind_name(kind: etcd_pb2.Permission.Type.ValueType) -> str:
    return etcd_pb2.Permission.Type.Name(kind).lower()


async def _change(client: EtcdClient, method: Method[Request, Reply], request: Request, action: str) -> None:
    """Make a change that was found missing: if it is there now, an attempt before has made it, whose answer
    was late or lost."""
    try:
        await client.call(method, request, action)
    except Rejected as error:
        if not (error.code is grpc.StatusCode.FAILED_PRECONDITION and str(error).endswith(_MADE)):
            raise


async def _get_or_none(
    client: EtcdClient, method: Method[Request, Reply], request: Request, action: str
) -> Reply | None:
    """Return the reply, or None if the user or role does not exist."""
    try:
        return (await client.call(method, request, action)).reply
    except Rejected as error:
        if error.code is grpc.StatusCode.FAILED_PRECONDITION and "not found" in str(error):
            return None
        raise
