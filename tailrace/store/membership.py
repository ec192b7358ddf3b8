"""The members and settings of the cluster, as last read from etcd."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, cast

from tailrace.cluster import Pool, Stage
from tailrace.records import (
    PROFILES,
    AdapterRecord,
    InstanceRecord,
    PolicyRecord,
    ProfileRecord,
    ServiceRecord,
)
from tailrace.rollout.facts import FrontEndFacts, InstanceFacts
from tailrace.rollout.record import RolloutRecord
from tailrace.service.tasks import cancel, supervise
from tailrace.slo import Slo
from tailrace.store.reading import (
    UnreadableRecord,
    read_named,
    read_policy,
    read_pool,
    read_record,
    read_slo,
    read_stages,
)
from tailrace.store.store import TOMBSTONES, Store
from tailrace.telemetry.incidents import (
    ODD_KEY,
    ODD_VALUE,
    RECORD_KINDS,
    TAKEN_NAME,
    UNREADABLE_NOW,
    guarded,
    unreadable,
)

log = logging.getLogger(__name__)

_HOLD_S: Final = 60.0
# After a change the process is left to others for this many times as long as the change took, but not for
# longer than `_REST_S`; changes during that time are applied together. Instances that start together are a
# change in etcd each, and the larger the fleet, the longer a change takes.
_REST: Final = 4.0
_REST_S: Final = 0.25
_FRONTEND: Final = "frontend"

_Record = TypeVar("_Record", AdapterRecord, InstanceRecord, ServiceRecord, ProfileRecord, RolloutRecord)
_Value = TypeVar("_Value")


class Membership:
    """Follow instances, services, leaders, pools, drains, stages, profiles, rollouts, adapters, policy and
    SLOs by one watch.

    An instance whose key vanished without a withdrawal is held as a suspect for `hold_s` seconds, then
    dropped. While etcd cannot be reached everything stays as it was.
    """

    def __init__(self, store: Store, hold_s: float) -> None:
        self._store = store
        self._hold_s = hold_s
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []
        # What was read by key, with the bytes that it was read from; None: they are unreadable.
        self._read: dict[str, tuple[bytes, object]] = {}
        self._suspects: dict[str, asyncio.TimerHandle] = {}
        # Read only; each change sets new ones. What they mean: see Members.
        self.instances: Mapping[str, InstanceRecord] = {}
        self.services: Mapping[tuple[str, str], ServiceRecord] = {}
        self.leaders: Mapping[str, ServiceRecord] = {}
        self.pools: Mapping[str, Pool] = {}
        self.stages: tuple[Stage, ...] = ()
        # An unchanged record remains the same object.
        self.profiles: Mapping[str, ProfileRecord] = {}
        self.draining: frozenset[str] = frozenset()
        self.leaving: frozenset[str] = frozenset()
        self.drained: frozenset[str] = frozenset()
        self.rollouts: Mapping[str, RolloutRecord] = {}
        self.unread_rollouts: frozenset[str] = frozenset()
        # The LoRA adapters that were loaded at run time, of all models, by key.
        self.adapters: Mapping[str, AdapterRecord] = {}
        # None: none was set.
        self.policy: PolicyRecord | None = None
        # Until they are set, the defaults.
        self.slo = Slo()
        # What was written by this revision has been read.
        self.revision = 0

    @classmethod
    async def start(cls, store: Store, hold_s: float = _HOLD_S) -> Membership:
        """Read etcd once; return a membership that follows it."""
        membership = cls(store, hold_s)
        first = asyncio.Event()
        membership._task = supervise("membership", lambda: membership._follow(first))
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
            await cancel(self._task)

    @property
    def suspects(self) -> frozenset[str]:
        """Return ids of instances whose key vanished without a withdrawal."""
        return frozenset(self._suspects)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call back after every change. The callback must not block or raise."""
        self._listeners.append(callback)

    # ---- following

    async def _follow(self, first: asyncio.Event) -> None:
        async for snapshot in self._store.watch_revisions(""):
            began_s = time.monotonic()
            self.revision = snapshot.revision
            self._apply(snapshot.values)
            UNREADABLE_NOW.labels(ODD_KEY).set(snapshot.odd_keys)
            UNREADABLE_NOW.labels(ODD_VALUE).set(snapshot.odd_values)
            first.set()
            self._notify()
            await asyncio.sleep(min(_REST_S, _REST * (time.monotonic() - began_s)))

    def _notify(self) -> None:
        for listener in self._listeners:
            # Other listeners and later changes must still be processed.
            with guarded("membership", "listener"):
                listener()

    def _apply(self, mapping: Mapping[str, bytes]) -> None:
        self._read = {key: entry for key, entry in self._read.items() if key in mapping}
        instances: dict[str, InstanceRecord] = {}
        services: dict[tuple[str, str], ServiceRecord] = {}
        leaders: dict[str, ServiceRecord] = {}
        profiles: dict[str, ProfileRecord] = {}
        rollouts: dict[str, RolloutRecord] = {}
        pools: dict[str, Pool] = {}
        unread: set[str] = set()
        adapters: dict[str, AdapterRecord] = {}
        for key, value in mapping.items():
            area, _, name = key.partition("/")
            if area == "instances" and (instance := self._named(key, value, InstanceRecord)):
                instances[name] = instance
            elif area == "services" and (service := self._named(key, value, ServiceRecord)):
                services[(service.kind, service.service_id)] = service
            elif area == "leader" and (leader := self._named(key, value, ServiceRecord)):
                leaders[name] = leader
            elif key.startswith(PROFILES) and (profile := self._named(key, value, ProfileRecord)):
                profiles[name] = profile
            elif area == "pools" and (pool := self._value(key, value, read_pool)):
                pools[name] = pool
            elif area == "adapters" and (adapter := self._named(key, value, AdapterRecord)):
                adapters[key] = adapter
            elif area == "rollouts":
                # If it cannot be read, keep the previous one: requests must not change their model.
                rollout = self._named(key, value, RolloutRecord) or self.rollouts.get(name)
                if rollout is None:
                    unread.add(name)
                else:
                    rollouts[name] = rollout
        self._hold_vanished(instances, mapping)
        self.instances = dict(sorted(instances.items()))
        self.services = services
        self.leaders = leaders
        self.profiles = profiles
        self.rollouts = rollouts
        self.unread_rollouts = frozenset(unread)
        self.pools = pools
        self.adapters = adapters
        # Drained by an operator; stopping by themselves; and drained by a rollout.
        self.drained = frozenset(key.partition("/")[2] for key in mapping if key.startswith("drains/"))
        stopping = {name for name, record in self.instances.items() if record.draining}
        stopped = self.drained | stopping
        self.leaving = _leaving(self.instances, services, rollouts) - stopped
        self.draining = stopped | self.leaving
        # A setting that cannot be read stays as it was.
        stages = self._value("stages", mapping.get("stages", b""), read_stages)
        self.stages = self.stages if stages is None else stages
        if not (policy := mapping.get("policy", b"")):
            self.policy = None
        else:
            self.policy = self._value("policy", policy, read_policy) or self.policy
        if not (slo := mapping.get("slo", b"")):
            self.slo = Slo()
        else:
            self.slo = self._value("slo", slo, read_slo) or self.slo
        self._show_unreadable()

    def _show_unreadable(self) -> None:
        counts = Counter(_kind(key) for key, (_, found) in self._read.items() if found is None)
        for kind in RECORD_KINDS:
            if kind != TAKEN_NAME:
                UNREADABLE_NOW.labels(kind).set(counts[kind])

    def _named(self, key: str, value: bytes, kind: type[_Record]) -> _Record | None:
        """Return the record at a key, or None if it is unreadable."""
        return self._value(key, value, lambda value: read_named(kind, key, value))

    def _value(self, key: str, value: bytes, read: Callable[[bytes], _Value]) -> _Value | None:
        """Return what is at a key, None if it is unreadable. An unchanged value remains the same object."""
        known = self._read.get(key)
        if known is None or known[0] != value:
            found: _Value | None = None
            try:
                found = read(value)
            except UnreadableRecord as error:
                unreadable(_kind(key), key, error)
            known = self._read[key] = (value, found)
        return cast("_Value | None", known[1])

    def _hold_vanished(self, instances: dict[str, InstanceRecord], mapping: Mapping[str, bytes]) -> None:
        """Add vanished instances that were not withdrawn to `instances`; start and stop their timers."""
        for name in instances:
            if (timer := self._suspects.pop(name, None)) is not None:
                timer.cancel()
                log.info("instance %s is back", name)
        for name, record in self.instances.items():
            if name in instances:
                continue
            if self._is_withdrawn(record, mapping):
                if (timer := self._suspects.pop(name, None)) is not None:
                    timer.cancel()
                continue
            instances[name] = record
            if name not in self._suspects:
                log.warning("instance %s vanished; held as a suspect for %.0f s", name, self._hold_s)
                loop = asyncio.get_running_loop()
                self._suspects[name] = loop.call_later(self._hold_s, self._drop, name)

    def _is_withdrawn(self, record: InstanceRecord, mapping: Mapping[str, bytes]) -> bool:
        """Return whether the incarnation in the record has withdrawn."""
        key = f"{TOMBSTONES}instances/{record.instance_id}"
        if key not in mapping:
            return False
        tombstone = self._value(key, mapping[key], lambda value: read_record(InstanceRecord, value))
        return tombstone is not None and tombstone.incarnation == record.incarnation

    def _drop(self, name: str) -> None:
        log.warning("instance %s did not come back; dropped", name)
        del self._suspects[name]
        self.instances = {other: record for other, record in self.instances.items() if other != name}
        self._notify()


def _kind(key: str) -> str:
    return f"{key.partition('/')[0]} record"


def front_end_facts(services: Mapping[tuple[str, str], ServiceRecord]) -> dict[str, FrontEndFacts]:
    """Return what rollouts need to know of each front end, by id; what names no model is none."""
    return {
        service_id: FrontEndFacts(
            service_id,
            record.model_name,
            record.model_key,
            record.model,
            frozenset(record.connected_models),
        )
        for (kind, service_id), record in services.items()
        if kind == _FRONTEND and record.model_name
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
    fronts = front_end_facts(services).values()

    def is_leaving(name: str) -> bool:
        record = instances[name]
        key = record.model_identity.key
        if not any(name in rollout.draining and rollout.retires(key) for rollout in rollouts.values()):
            return False
        return not any(front.uses(InstanceFacts(name, key, record.model), rollouts) for front in fronts)

    return frozenset(filter(is_leaving, named))
