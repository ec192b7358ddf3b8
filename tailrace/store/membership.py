"""The members and settings of the cluster, as last read from etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from tailrace.cluster import Pool, Stage
from tailrace.records import (
    PROFILES,
    InstanceRecord,
    PolicyRecord,
    ProfileRecord,
    ServiceRecord,
    StageRecord,
    decode_policy,
    decode_slo,
)
from tailrace.rollout.facts import FrontEndFacts, InstanceFacts
from tailrace.rollout.record import RolloutRecord
from tailrace.slo import Slo
from tailrace.store.store import TOMBSTONES, Store

log = logging.getLogger(__name__)

_HOLD_S: Final = 60.0
_FRONTEND: Final = "frontend"

_Record = TypeVar("_Record", InstanceRecord, ServiceRecord, ProfileRecord, RolloutRecord)


class Membership:
    """Follow instances, services, leaders, pools, drains, stages, profiles, rollouts, policy and SLOs by one
    watch.

    An instance whose key vanished without a withdrawal is held as a suspect for `hold_s` seconds, then
    dropped. While etcd cannot be reached everything stays as it was.
    """

    def __init__(self, store: Store, hold_s: float) -> None:
        self._store = store
        self._hold_s = hold_s
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []
        # Decoded records by key, with the bytes they were decoded from.
        self._decoded: dict[
            str, tuple[bytes, InstanceRecord | ServiceRecord | ProfileRecord | RolloutRecord]
        ] = {}
        self._suspects: dict[str, asyncio.TimerHandle] = {}
        self._instances: dict[str, InstanceRecord] = {}
        self._services: dict[tuple[str, str], ServiceRecord] = {}
        self._leaders: dict[str, ServiceRecord] = {}
        self._pools: dict[str, Pool] = {}
        self._draining: frozenset[str] = frozenset()
        self._drained: frozenset[str] = frozenset()
        self._leaving: frozenset[str] = frozenset()
        self._stages: tuple[Stage, ...] = ()
        self._policy: PolicyRecord | None = None
        self._slo = Slo()
        self._profiles: dict[str, ProfileRecord] = {}
        self._rollouts: dict[str, RolloutRecord] = {}
        self._unread_rollouts: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, store: Store, hold_s: float = _HOLD_S) -> Membership:
        """Read etcd once; return a membership that follows it."""
        membership = cls(store, hold_s)
        first = asyncio.Event()
        membership._task = asyncio.create_task(membership._follow(first), name="membership")
        try:
            await first.wait()
        except asyncio.CancelledError:
            await membership.close()
            raise
        return membership

    async def close(self) -> None:
        """Stop following."""
        for timer in self._suspects.values():
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """Return instances by id, suspects included."""
        return MappingProxyType(self._instances)

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]:
        """Return services by (kind, id)."""
        return MappingProxyType(self._services)

    @property
    def leaders(self) -> Mapping[str, ServiceRecord]:
        """Return the elected service of each kind that elects one."""
        return MappingProxyType(self._leaders)

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Return pools by instance id; an instance in no pool is absent."""
        return MappingProxyType(self._pools)

    @property
    def draining(self) -> frozenset[str]:
        """Return ids of instances that get no new requests."""
        return self._draining

    @property
    def leaving(self) -> frozenset[str]:
        """Return the draining instances that only a rollout drains."""
        return self._leaving

    @property
    def drained(self) -> frozenset[str]:
        """Return ids that an operator drains, whether such instances exist or not."""
        return self._drained

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the length stages; empty if there are none."""
        return self._stages

    @property
    def policy(self) -> PolicyRecord | None:
        """Return the policy that was set, or None."""
        return self._policy

    @property
    def slo(self) -> Slo:
        """Return the deployment's SLOs, or the defaults until they are set."""
        return self._slo

    @property
    def profiles(self) -> Mapping[str, ProfileRecord]:
        """Return measured profiles by kind of instance. An unchanged record remains the same object."""
        return MappingProxyType(self._profiles)

    @property
    def rollouts(self) -> Mapping[str, RolloutRecord]:
        """Return rollouts by public name: which model takes its new requests."""
        return MappingProxyType(self._rollouts)

    @property
    def unread_rollouts(self) -> frozenset[str]:
        """Return names whose rollout this version cannot read, and for which no earlier one is known."""
        return self._unread_rollouts

    @property
    def suspects(self) -> frozenset[str]:
        """Return ids of instances whose key vanished without a withdrawal."""
        return frozenset(self._suspects)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call back after every change. The callback must not block or raise."""
        self._listeners.append(callback)

    # ---- following

    async def _follow(self, first: asyncio.Event) -> None:
        async for mapping in self._store.watch_prefix(""):
            self._apply(mapping)
            first.set()
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                # Other listeners and later changes must still be processed.
                log.exception("a listener to membership failed")

    def _apply(self, mapping: Mapping[str, bytes]) -> None:
        self._decoded = {key: entry for key, entry in self._decoded.items() if key in mapping}
        instances: dict[str, InstanceRecord] = {}
        services: dict[tuple[str, str], ServiceRecord] = {}
        leaders: dict[str, ServiceRecord] = {}
        profiles: dict[str, ProfileRecord] = {}
        rollouts: dict[str, RolloutRecord] = {}
        unread: set[str] = set()
        for key, value in mapping.items():
            area, _, name = key.partition("/")
            if area == "instances" and (instance := self._decode(key, value, InstanceRecord)):
                instances[name] = instance
            elif area == "services" and (service := self._decode(key, value, ServiceRecord)):
                services[(service.kind, service.service_id)] = service
            elif area == "leader" and (leader := self._decode(key, value, ServiceRecord)):
                leaders[name] = leader
            elif key.startswith(PROFILES) and (profile := self._decode(key, value, ProfileRecord)):
                profiles[name] = profile
            elif area == "rollouts":
                # If it cannot be read, keep the previous one: requests must not change their model.
                rollout = self._decode(key, value, RolloutRecord) or self._rollouts.get(name)
                if rollout is None:
                    unread.add(name)
                else:
                    rollouts[name] = rollout
        self._hold_vanished(instances, mapping)
        self._instances = dict(sorted(instances.items()))
        self._services = services
        self._leaders = leaders
        self._profiles = profiles
        self._rollouts = rollouts
        self._unread_rollouts = frozenset(unread)
        self._pools = _pools(mapping)
        # Drained by an operator; stopping by themselves; and drained by a rollout.
        self._drained = frozenset(key.partition("/")[2] for key in mapping if key.startswith("drains/"))
        stopping = {name for name, record in self._instances.items() if record.draining}
        stopped = self._drained | stopping
        self._leaving = _leaving(self._instances, services, rollouts) - stopped
        self._draining = stopped | self._leaving
        self._stages = _stages(mapping.get("stages"))
        with _keep_on_error("policy"):
            self._policy = decode_policy(mapping.get("policy", b""))
        with _keep_on_error("slo"):
            self._slo = decode_slo(mapping["slo"]) if mapping.get("slo") else Slo()

    def _decode(self, key: str, value: bytes, kind: type[_Record]) -> _Record | None:
        known = self._decoded.get(key)
        if known is not None and known[0] == value and isinstance(known[1], kind):
            return known[1]
        try:
            record = msgspec.json.decode(value, type=kind)
        except msgspec.MsgspecError as error:
            log.warning("etcd key %s is not a %s: %s", key, kind.__name__, error)
            return None
        self._decoded[key] = (value, record)
        return record

    def _hold_vanished(self, instances: dict[str, InstanceRecord], mapping: Mapping[str, bytes]) -> None:
        """Add vanished instances that were not withdrawn to `instances`; start and stop their timers."""
        for name in instances:
            if (timer := self._suspects.pop(name, None)) is not None:
                timer.cancel()
                log.info("instance %s is back", name)
        for name, record in self._instances.items():
            if name in instances:
                continue
            if _withdrawn(mapping.get(f"{TOMBSTONES}instances/{name}"), record):
                if (timer := self._suspects.pop(name, None)) is not None:
                    timer.cancel()
                continue
            instances[name] = record
            if name not in self._suspects:
                log.warning("instance %s vanished; held as a suspect for %.0f s", name, self._hold_s)
                loop = asyncio.get_running_loop()
                self._suspects[name] = loop.call_later(self._hold_s, self._drop, name)

    def _drop(self, name: str) -> None:
        log.warning("instance %s did not come back; dropped", name)
        del self._suspects[name]
        self._instances = {other: record for other, record in self._instances.items() if other != name}
        self._notify()


def front_end_facts(services: Mapping[tuple[str, str], ServiceRecord]) -> dict[str, FrontEndFacts]:
    """Return what rollouts need to know of each front end, by id."""
    return {
        service_id: FrontEndFacts(
            service_id,
            record.model_name,
            record.model_key,
            record.model,
            frozenset(record.connected_models),
        )
        for (kind, service_id), record in services.items()
        if kind == _FRONTEND
    }


def _leaving(
    instances: Mapping[str, InstanceRecord],
    services: Mapping[tuple[str, str], ServiceRecord],
    rollouts: Mapping[str, RolloutRecord],
) -> frozenset[str]:
    """Return instances that a rollout drains while they run the retiring model and no other public name uses
    it."""
    named = {name for rollout in rollouts.values() for name in rollout.draining if name in instances}
    if not named:
        return frozenset()
    fronts = [front for front in front_end_facts(services).values() if front.name]

    def is_leaving(name: str) -> bool:
        record = instances[name]
        if record.model_identity is None:
            return False
        key = record.model_identity.key
        if not any(name in rollout.draining and rollout.retires(key) for rollout in rollouts.values()):
            return False
        return not any(front.uses(InstanceFacts(name, key, record.model), rollouts) for front in fronts)

    return frozenset(filter(is_leaving, named))


def _withdrawn(tombstone: bytes | None, record: InstanceRecord) -> bool:
    """Return whether the incarnation in the record has withdrawn."""
    if tombstone is None:
        return False
    try:
        withdrawn_record = msgspec.json.decode(tombstone, type=InstanceRecord)
    except msgspec.MsgspecError:
        return False
    return withdrawn_record.incarnation == record.incarnation


@contextlib.contextmanager
def _keep_on_error(key: str) -> Iterator[None]:
    """Log a decoding error of the block, which then changes nothing."""
    try:
        yield
    except msgspec.MsgspecError as error:
        log.warning("etcd key %s cannot be read, keeping the previous value: %s", key, error)


def _pools(mapping: Mapping[str, bytes]) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    for key, value in mapping.items():
        if key.startswith("pools/"):
            try:
                pools[key.partition("/")[2]] = Pool(value.decode())
            except ValueError:
                log.warning("etcd key %s: %r is not a pool", key, value)
    return pools


def _stages(value: bytes | None) -> tuple[Stage, ...]:
    if not value:
        return ()
    try:
        records = msgspec.json.decode(value, type=list[StageRecord])
    except msgspec.MsgspecError as error:
        log.warning("etcd key stages: %s", error)
        return ()
    return tuple(Stage(r.lo, r.hi, tuple(r.instance_ids)) for r in records)
