"""What a front end knows of the fleet: membership as last heard, and who answers on its own links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tailrace.cluster import Pool
from tailrace.records import InstanceRecord, ServiceRecord


class Members(Protocol):
    """The part of tailrace.store.membership.Membership that is used here."""

    @property
    def instances(self) -> Mapping[str, InstanceRecord]: ...
    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]: ...
    @property
    def leaders(self) -> Mapping[str, ServiceRecord]: ...
    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def draining(self) -> frozenset[str]: ...
    @property
    def suspects(self) -> frozenset[str]: ...
    def add_listener(self, callback: Callable[[], None]) -> None: ...


def usable(members: Members, attached: list[str]) -> list[str]:
    """Instances that may get new work as far as this front end can tell.

    Suspects only when there is nobody else: etcd has not heard of them, but they do answer here.
    """
    willing = [i for i in attached if i not in members.draining]
    return [i for i in willing if i not in members.suspects] or willing


# Arrow's pools: these take no prefills (P->D finishes the ones it has).
_NO_PREFILL = frozenset({Pool.DECODE, Pool.PREFILL_TO_DECODE})


def may_prefill(members: Members, candidates: list[str]) -> list[str]:
    """Those in a pool that prefills; all of them when there is none, which is better than no answer."""
    prefill = [i for i in candidates if members.pools.get(i) not in _NO_PREFILL]
    return prefill or candidates
