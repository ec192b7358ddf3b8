"""What a front end knows of the fleet: membership as last heard, and who answers on its own links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tailrace.cluster import Pool
from tailrace.records import InstanceRecord, ServiceRecord
from tailrace.v1 import worker_pb2


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


class Fleet:
    """Membership as last heard, and what instances say over their links, which etcd may not know yet."""

    def __init__(self, members: Members) -> None:
        self._members = members
        # Instances that said that they drain, by the incarnation that did.
        self._stopping: dict[str, str] = {}

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """See Members."""
        return self._members.instances

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]:
        """See Members."""
        return self._members.services

    @property
    def leaders(self) -> Mapping[str, ServiceRecord]:
        """See Members."""
        return self._members.leaders

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See Members."""
        return self._members.pools

    @property
    def draining(self) -> frozenset[str]:
        """Instances that get nothing new."""
        draining = self._members.draining
        return draining.union(self._stopping) if self._stopping else draining

    @property
    def suspects(self) -> frozenset[str]:
        """See Members."""
        return self._members.suspects

    def add_listener(self, callback: Callable[[], None]) -> None:
        """See Members. What instances say themselves comes by their links alone."""
        self._members.add_listener(callback)

    def attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """An instance greets: whether it drains is known anew."""
        self._stopping.pop(instance_id, None)
        if hello.draining:
            self.stopping(instance_id)

    def stopping(self, instance_id: str) -> None:
        """An instance says that it drains."""
        record = self.instances.get(instance_id)
        if record is not None:
            self._stopping[instance_id] = record.incarnation

    def refresh(self) -> None:
        """Membership has changed: forget what instances said that are gone, or were started again."""
        instances = self.instances
        self._stopping = {
            name: incarnation
            for name, incarnation in self._stopping.items()
            if name in instances and instances[name].incarnation == incarnation
        }


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
