"""The access rights of each role in etcd: what its service needs, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tailrace.security.roles import MEMBERS, Role

# The keys that a service holds by a lease, and the markers of its withdrawal.
_SERVICE: Final = ("services/{role}/", "withdrawn/services/{role}/", "leader/{role}")

_WRITES: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.FRONTEND: (*_SERVICE[:2], "adapters/"),
        Role.MONITOR: _SERVICE,
        Role.MIGRATION: _SERVICE,
        Role.SCHEDULER: (*_SERVICE, "pools/", "stages", "policy", "slo", "drains/", "rollouts/"),
        Role.WORKER: ("instances/", "withdrawn/instances/", "profiles/", "profiling/"),
    }
)

REVISION_KEY: Final = "/tailrace"
"""A key that never exists; a read of it returns etcd's current revision."""


@dataclass(frozen=True, slots=True)
class Rights:
    """One role's rights in one cluster. Keys that end in `/` are prefixes."""

    role: Role
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def etcd_rights(cluster: str) -> list[Rights]:
    """Return the rights of every role that uses etcd.

    Every member reads the whole cluster, because it follows membership, pools, stages, policy and SLOs.
    Prompts are never stored in etcd.
    """
    prefix = f"{REVISION_KEY}/{cluster}/"
    return [
        Rights(
            role,
            (REVISION_KEY, prefix),
            tuple(prefix + key.format(role=role.value) for key in _WRITES[role]),
        )
        for role in sorted(MEMBERS)
    ]
