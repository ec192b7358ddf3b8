"""The instances that a front end may use: membership from etcd, corrected by what its own links report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend_svc.streams import Requirements
from tailrace.cache.names import Naming
from tailrace.cluster import Pool
from tailrace.members import Members
from tailrace.model_identity import ModelIdentity, covers, fingerprint
from tailrace.records import InstanceRecord
from tailrace.rollout.record import RolloutRecord
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


def common_naming(records: Iterable[InstanceRecord]) -> Naming | None:
    """Return the block naming that most of these instances use, or None if none of them reports one."""
    namings = Counter(record.block_naming for record in records if record.block_naming is not None)
    return max(namings, key=lambda naming: (namings[naming], repr(naming)), default=None)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a front end serves.

    `name` is the folder or model name that the front end was started with, `public_name` the name that users
    send in requests.
    """

    name: str
    identity: ModelIdentity
    public_name: str = ""

    @property
    def key(self) -> str:
        """Return the key that matches every instance that may answer here, whatever its precision."""
        return self.identity.key

    def is_run_by(self, record: InstanceRecord) -> bool:
        """Return whether an instance may answer here.

        It must have the same configuration, tokenizer and weights. If the front end has no weights to
        identify, the instance must have been started with the same model name instead.
        """
        if not covers(self.key, record.model_identity.key):
            return False
        return bool(self.identity.weights) or record.model == self.name


# Arrow's pools: these take no prefills (P->D finishes the ones it has).
_NO_PREFILL: Final = frozenset({Pool.DECODE, Pool.PREFILL_TO_DECODE})


class ModelFleet:
    """Combine membership with what instances report over their links, which etcd may not show yet.

    Only instances of the front end's model are in it. While a rollout decides which model takes the new
    requests of the public name, the instances of both of its models are.
    """

    def __init__(self, members: Members, served: ServedModel | None = None) -> None:
        """Read membership as it is now. `served`: None accepts whatever model the instances run."""
        self.members = members
        self._served = served
        # The instances of the model by id, suspects included. Read only.
        self.instances: Mapping[str, InstanceRecord] = {}
        # Key of the model that may answer a new request: the full key if all instances run exactly one model,
        # else the short key that covers them.
        self.model = ""
        self._rollout: RolloutRecord | None = None
        # A rollout that a scheduler reported before etcd's watch did.
        self._scheduler_rollout: RolloutRecord | None = None
        self._listeners: list[Callable[[], None]] = []
        # See `incapable`.
        self._pooling = self._generating = self._without_adapters = frozenset[str]()
        # How instances name their KV blocks; None if none reports it.
        self.naming: Naming | None = None
        # Instances of other models, each with the incarnation for which that was logged.
        self._logged_mismatches: dict[str, str] = {}
        # Model keys reported by attached instances, which may have left the membership since.
        self._reported_models: dict[str, str] = {}
        # Instances that reported that they drain, each with its incarnation.
        self._reported_draining: dict[str, str] = {}
        self.refresh()

    def accepting_new(self, instance_ids: Iterable[str]) -> list[str]:
        """Return those of these instances whose model takes new requests."""
        if self.rollout_error:
            return []
        return [instance_id for instance_id in instance_ids if self.is_model(instance_id, self.model)]

    def models_of(self, instance_ids: Iterable[str]) -> frozenset[str]:
        """Return the keys of the models that these instances report."""
        return frozenset(filter(None, map(self.model_of, instance_ids)))

    def model_of(self, instance_id: str) -> str:
        """Return the key of the model that an instance runs; empty if unknown."""
        reported = self._reported_models.get(instance_id)
        if reported:
            return reported
        record = self.instances.get(instance_id)
        return "" if record is None else record.model_identity.key

    def is_model(self, instance_id: str, model: str) -> bool:
        """Return whether an attached instance runs the model of this key."""
        return covers(model, self.model_of(instance_id))

    def incapable(self, requirements: Requirements) -> frozenset[str]:
        """Return instances that run the model but cannot serve a request with these requirements."""
        others = self._pooling if requirements.generates else self._generating
        return others | self._without_adapters if requirements.adapter else others

    def usable(self, instance_ids: Iterable[str]) -> list[str]:
        """Return those of these attached instances that may get new work as far as this front end knows.

        Suspects, which etcd has not heard of but which do answer here, are used only if there is no other.
        """
        draining, suspects = self.draining, self.members.suspects
        not_draining = [i for i in instance_ids if i not in draining]
        return [i for i in not_draining if i not in suspects] or not_draining

    def prefilling(self, instance_ids: Sequence[str]) -> Sequence[str]:
        """Return those of these instances in a pool that prefills; all of them if there is none, so that the
        request is still served."""
        pools = self.members.pools
        return [i for i in instance_ids if pools.get(i) not in _NO_PREFILL] or instance_ids

    @property
    def draining(self) -> frozenset[str]:
        """Return instances that get no new requests."""
        draining = self.members.draining
        return draining.union(self._reported_draining) if self._reported_draining else draining

    @property
    def leaving(self) -> frozenset[str]:
        """Return the draining instances that only a rollout drains."""
        return self.members.leaving.difference(self._reported_draining)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` when membership changes or a scheduler reports a newer rollout.

        What instances report over their links does not call it.
        """
        self.members.add_listener(callback)
        self._listeners.append(callback)

    @property
    def public_name(self) -> str:
        """Return the model name that users send; empty if any model is served."""
        return "" if self._served is None else self._served.public_name

    @property
    def rollout_error(self) -> str:
        """Return why it is unknown which model takes new requests; empty if it is known."""
        if self._newest_rollout() is not None or self.public_name not in self.members.unread_rollouts:
            return ""
        return f"the rollout of {self.public_name} cannot be read by this version of the front end"

    def learn_rollout(self, rollout: RolloutRecord) -> bool:
        """Take over a rollout that a scheduler reports; return whether it is newer than what is known here.

        It is ignored while no known instance runs the model that takes new requests: a front end that is cut
        off from etcd cannot discover others, and the old ones may still answer.
        """
        served, known = self._served, self._newest_rollout()
        if served is None or not rollout.steers(served.key):
            return False
        if rollout.model != served.public_name or (known is not None and not rollout.newer_than(known)):
            return False
        keys = {record.model_identity.key for record in self.members.instances.values()}
        if not any(covers(rollout.in_force, key) for key in keys):
            return False
        log.warning("a scheduler reports a rollout that etcd's watch has not delivered: is etcd reachable?")
        self._scheduler_rollout = rollout
        self.refresh()
        for callback in self._listeners:
            callback()
        return True

    def _newest_rollout(self) -> RolloutRecord | None:
        """Return the newer of the rollouts reported by etcd and by a scheduler."""
        from_etcd, from_scheduler = self.members.rollouts.get(self.public_name), self._scheduler_rollout
        if from_etcd is None or from_scheduler is None:
            return from_etcd or from_scheduler
        return from_scheduler if from_scheduler.newer_than(from_etcd) else from_etcd

    def attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """Record the model and draining state that an instance reports in its hello."""
        self._reported_models[instance_id] = hello.model
        self._reported_draining.pop(instance_id, None)
        if hello.draining:
            self.mark_draining(instance_id)

    def lost(self, instance_id: str) -> None:
        """Drop what an instance reported that is not attached any more."""
        self._reported_models.pop(instance_id, None)

    def mark_draining(self, instance_id: str) -> None:
        """Record that an instance reported that it drains."""
        record = self.instances.get(instance_id)
        if record is not None:
            self._reported_draining[instance_id] = record.incarnation

    def refresh(self) -> None:
        """Recompute which instances may be used after a membership change.

        What was reported by instances that left or restarted is dropped.
        """
        self._rollout = self._steering_rollout()
        instances = self.instances = self._matching_instances()
        self._pooling = frozenset(name for name, record in instances.items() if record.pooling)
        self._generating = frozenset(instances) - self._pooling
        self._without_adapters = frozenset(n for n, record in instances.items() if not record.takes_adapters)
        self.naming = common_naming(instances.values())
        if self._served is not None:
            takes = self._served.key if self._rollout is None else self._rollout.in_force
            keys = {key for key in self.models_of(instances) if covers(takes, key)}
            self.model = keys.pop() if len(keys) == 1 else takes
        self._reported_draining = {
            name: incarnation
            for name, incarnation in self._reported_draining.items()
            if name in instances and instances[name].incarnation == incarnation
        }

    def _steering_rollout(self) -> RolloutRecord | None:
        """Return the rollout that decides which model takes new requests, or None if the front end's own
        model does."""
        served = self._served
        rollout = self._newest_rollout()
        if served is None or rollout is None or not rollout.steers(served.key):
            return None
        before = self._rollout
        if before is None or before.in_force != rollout.in_force:
            log.info("new requests go to model %s (%s)", fingerprint(rollout.in_force), rollout.state.value)
        return rollout

    def _runs_model(self, served: ServedModel, record: InstanceRecord) -> bool:
        if self._rollout is None:
            return served.is_run_by(record)
        return self._rollout.has_model(record.model_identity.key)

    def _matching_instances(self) -> dict[str, InstanceRecord]:
        """Return members that run the model; log each of the others once."""
        known = self.members.instances
        served = self._served
        if served is None:
            return dict(known)
        chosen = {name: record for name, record in known.items() if self._runs_model(served, record)}
        for name in known.keys() - chosen.keys():
            if self._logged_mismatches.get(name) != known[name].incarnation:
                log.warning(
                    "%s runs a different model (%s) than this front end serves (%s): not used",
                    name,
                    known[name].model,
                    served.name,
                )
        self._logged_mismatches = {name: known[name].incarnation for name in known.keys() - chosen.keys()}
        return chosen
