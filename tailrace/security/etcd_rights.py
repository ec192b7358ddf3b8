"""What each role may read and write in etcd: what its service does there, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tailrace.security.roles import MEMBERS, Role

# Everything that a service of the kind keeps by a lease, and the word that it took it away.
_SERVICE: Final = ("services/{role}/", "withdrawn/services/{role}/", "leader/{role}")

_WRITES: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.FRONTEND: _SERVICE[:2],
        Role.MONITOR: _SERVICE,
        Role.MIGRATION: _SERVICE,
        Role.SCHEDULER: (*_SERVICE, "pools/", "stages", "policy", "slo", "drains/", "rollouts/"),
        Role.WORKER: ("instances/", "withdrawn/instances/", "profiles/", "profiling/"),
    }
)

REVISION_KEY: Final = "/tailrace"
"""Nothing is there; reading it tells how far etcd is."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Of one role in one cluster. Keys that end in `/` are prefixes."""

    role: Role
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def etcd_rights(cluster: str) -> list[Rights]:
    """Of all roles that use etcd.

    Every member reads the whole cluster: it follows membership, pools, stages, policy and SLOs. No prompt is
    ever there.
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
