"""Which services of a kind to ask, and in which order: the elected one before the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tailrace.records import ServiceRecord


class Services(Protocol):
    """The part of tailrace.store.membership.Membership that is used here."""

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]: ...
    @property
    def leaders(self) -> Mapping[str, ServiceRecord]: ...


def preferred(members: Services, kind: str) -> list[ServiceRecord]:
    """The leader, if one is known, then the others by id; each address once."""
    found: dict[str, ServiceRecord] = {}
    if (leader := members.leaders.get(kind)) is not None:
        found[leader.address] = leader
    for (each, _), record in sorted(members.services.items(), key=_key):
        if each == kind:
            found.setdefault(record.address, record)
    return list(found.values())


def first_address(members: Services, kind: str) -> str | None:
    """Where to ask first; None: no such service is known."""
    return next((record.address for record in preferred(members, kind)), None)


def _key(item: tuple[tuple[str, str], ServiceRecord]) -> tuple[str, str]:
    return item[0]
