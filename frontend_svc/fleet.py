"""What a front end knows of the fleet: membership as last heard, and who answers on its own links."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from frontend_svc.prefixes import common_naming
from frontend_svc.served_model import ServedModel
from frontend_svc.streams import Needs
from tailrace.cache.names import Naming
from tailrace.cluster import Pool
from tailrace.model_identity import is_model
from tailrace.records import InstanceRecord, ServiceRecord
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


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
    """Membership as last heard, and what instances say over their links, which etcd may not know yet.

    Instances that run another model than the front end serves are not in it.
    """

    def __init__(self, members: Members, served: ServedModel | None = None) -> None:
        """`served` None: whatever model the instances run."""
        self._members = members
        self._served = served
        self._instances: dict[str, InstanceRecord] = {}
        self._model = ""
        # See `unable`.
        self._pooling = self._generating = self._without_adapters = frozenset[str]()
        self._naming: Naming | None = None
        # Instances of other models, by the incarnation that was logged.
        self._others: dict[str, str] = {}
        # Instances that said that they drain, by the incarnation that did.
        self._stopping: dict[str, str] = {}
        self.refresh()

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """By instance id, suspects included: those that run the model."""
        return MappingProxyType(self._instances)

    @property
    def model(self) -> str:
        """Key of the model that may answer a new request: exact where all instances are of one, else
        short."""
        return self._model

    @property
    def naming(self) -> Naming | None:
        """How the instances name their KV blocks; None: none of them tells."""
        return self._naming

    def model_of(self, instance_id: str) -> str:
        """Key of the model that an instance runs; empty: it is not known."""
        record = self._instances.get(instance_id)
        return record.model_identity.key if record is not None and record.model_identity is not None else ""

    def is_model(self, instance_id: str, model: str) -> bool:
        """Whether an instance that is attached may run the model of this key."""
        record = self._instances.get(instance_id)
        return is_model(None if record is None else record.model_identity, model)

    def unable(self, needs: Needs) -> frozenset[str]:
        """Instances that run the model and yet not such a request."""
        others = self._pooling if needs.generates else self._generating
        return others | self._without_adapters if needs.adapter else others

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
        """Membership has changed: take over who runs the model. What instances said that are gone, or were
        started again, counts no more."""
        instances = self._instances = self._choose()
        self._pooling = frozenset(name for name, record in instances.items() if record.pooling)
        self._generating = frozenset(instances) - self._pooling
        self._without_adapters = frozenset(n for n, record in instances.items() if not record.takes_adapters)
        self._naming = common_naming(instances.values())
        keys = {
            record.model_identity.key for record in instances.values() if record.model_identity is not None
        }
        if self._served is not None:
            self._model = keys.pop() if len(keys) == 1 else self._served.key
        self._stopping = {
            name: incarnation
            for name, incarnation in self._stopping.items()
            if name in instances and instances[name].incarnation == incarnation
        }

    def _choose(self) -> dict[str, InstanceRecord]:
        """Members that run the model. Others are logged, once each."""
        known = self._members.instances
        if self._served is None:
            return dict(known)
        chosen = {name: record for name, record in known.items() if self._served.is_run_by(record)}
        for name in known.keys() - chosen.keys():
            if self._others.get(name) != known[name].incarnation:
                log.warning(
                    "%s runs another model (%s) than this front end serves (%s): it is not used here",
                    name,
                    known[name].model,
                    self._served.name,
                )
        self._others = {name: known[name].incarnation for name in known.keys() - chosen.keys()}
        return chosen


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
