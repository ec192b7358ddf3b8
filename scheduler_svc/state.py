"""The cluster's state: membership and reports, kept incrementally, as an immutable view for policies.

Pure: no I/O; the caller brings the time, in seconds of its monotonic clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from scheduler_svc.known_cache import KnownCache
from scheduler_svc.model_groups import ModelGroups
from scheduler_svc.tracked import Tracked
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
    Stage,
)
from tailrace.intra.base import QUANTUM_TOKENS
from tailrace.lengths import LengthStatistics, LengthWindow
from tailrace.policy.measured import Measured
from tailrace.records import InstanceRecord, ProfileRecord
from tailrace.v1 import monitor_pb2, types_pb2


class Members(Protocol):
    """The part of tailrace.store.membership.Membership that is used here."""

    @property
    def instances(self) -> Mapping[str, InstanceRecord]: ...
    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def draining(self) -> frozenset[str]: ...
    @property
    def suspects(self) -> frozenset[str]: ...
    @property
    def stages(self) -> tuple[Stage, ...]: ...
    @property
    def profiles(self) -> Mapping[str, ProfileRecord]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseChange:
    """A request left a phase and entered another."""

    request: RequestView
    left: Phase


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PoolOrder:
    """An instance was ordered from one pool to another."""

    instance_id: str
    before: Pool | None
    pool: Pool | None


@dataclasses.dataclass(slots=True)
class _Where:
    """Who has a request, as far as reports tell."""

    instance_id: str
    epoch: int
    phase: Phase


class ClusterState:
    """Everything known of instances and requests."""

    def __init__(self) -> None:
        # Where prefixes are.
        self.cache = KnownCache()
        self._tracked: dict[str, Tracked] = {}
        self._quantum_tokens = QUANTUM_TOKENS
        self._where: dict[str, _Where] = {}
        # Open migrations by request: from where, and to where if that is known.
        self._migrating: dict[str, tuple[str, str | None]] = {}
        self._silent: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._draining: frozenset[str] = frozenset()
        self._pools: Mapping[str, Pool] = {}
        # Orders that etcd does not tell of yet, by instance.
        self._ordered: dict[str, PoolOrder] = {}
        self._stages: tuple[Stage, ...] = ()
        # By kind of instance, beside the records that they were made from.
        self._measured: dict[str, tuple[ProfileRecord, Measured]] = {}
        self._views: dict[str, InstanceView] = {}
        self._dirty: set[str] = set()
        self._view: ClusterView | None = None
        self._groups = ModelGroups({})
        # Views of some of the instances, by which, beside the view of all that they were made from.
        self._partial: dict[frozenset[str], tuple[ClusterView, ClusterView]] = {}
        # None: nobody wants to know.
        self._lengths: LengthWindow | None = None

    # ---- what happens

    def set_members(self, members: Members, now_s: float) -> None:
        """Take over membership, pools, drains, stages and profiles. A new incarnation starts from nothing."""
        tracked: dict[str, Tracked] = {}
        for name in sorted(members.instances):
            record = members.instances[name]
            known = self._tracked.get(name)
            if known is None or known.record.incarnation != record.incarnation:
                known = Tracked(record, now_s, self._quantum_tokens)
                self._forget([r for r, where in self._where.items() if where.instance_id == name])
            known.record = record
            tracked[name] = known
        self._tracked = tracked
        self.cache.set_instances(members.instances)
        self._groups = ModelGroups(members.instances)
        self._partial.clear()
        self._forget([r for r, where in self._where.items() if where.instance_id not in tracked])
        self._suspects = members.suspects
        self._draining = members.draining
        self._ordered = {
            name: order
            for name, order in self._ordered.items()
            if name in tracked and members.pools.get(name) is self._pools.get(name)
        }
        self._pools = members.pools
        self._stages = members.stages
        self._measured = {
            kind: made
            if (made := self._measured.get(kind)) is not None and made[0] is record
            else (record, Measured.of(record))
            for kind, record in members.profiles.items()
        }
        self._rebuild()

    def count_fresh_by(self, quantum_tokens: int) -> None:
        """Count fresh answers by the quantum of the policy that decides."""
        if quantum_tokens != self._quantum_tokens:
            self._quantum_tokens = quantum_tokens
            for tracked in self._tracked.values():
                tracked.count_by(quantum_tokens)
            self._rebuild()

    def set_silent(self, names: Collection[str]) -> None:
        """Take over which instances have stopped reporting.

        When all have, it is the monitor that hears nothing; who is alive the front ends know better.
        """
        silent = frozenset(names)
        if silent >= self._tracked.keys():
            silent = frozenset()
        if silent != self._silent:
            self._silent = silent
            self._rebuild()

    def apply(self, report: monitor_pb2.WorkerReport, now_s: float) -> list[PhaseChange]:
        """Take one report in; what it tells of phases, in order. Reports of strangers say nothing."""
        tracked = self._tracked.get(report.instance_id)
        if tracked is None or tracked.record.incarnation != report.incarnation:
            return []
        self.cache.apply(report)
        changes: list[PhaseChange] = []
        if report.HasField("load"):
            gone = tracked.report(report, self._migrating, now_s)
            for request_id in gone:
                self._left(request_id, report.instance_id)
            for request in tracked.requests.values():
                self._seen(request, changes, now_s)
        for event in report.phase_events:
            if event.phase == types_pb2.PHASE_UNSPECIFIED:
                self._note_finished(tracked, event, now_s)
                tracked.gone(event.request_id)
                self._left(event.request_id, report.instance_id)
            elif (entered := tracked.event(event)) is not None:
                self._entered(entered, changes, now_s)
        self._touch(report.instance_id)
        return changes

    def place(self, arrival: Arrival, instance_id: str, frontend_id: str, now_s: float) -> None:
        """Count a placement in before any report shows it, so that a burst does not pile up."""
        tracked = self._tracked.get(instance_id)
        if tracked is None:
            return
        where = self._where.get(arrival.request_id)
        if where is not None and (before := self._tracked.get(where.instance_id)) is not None:
            before.unplace(arrival.request_id)
            self._touch(where.instance_id)
        epoch = where.epoch if where is not None else 0
        request = RequestView(
            request_id=arrival.request_id,
            instance_id=instance_id,
            phase=Phase.PREFILL,
            state=RequestState.WAITING,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            max_tokens=arrival.max_tokens,
            epoch=epoch,
            frontend_id=frontend_id,
        )
        if where is None and not arrival.output_tokens:
            self._note_arrived(request, now_s)
        self.cache.placed(instance_id, arrival.block_names, now_s)
        forgotten = tracked.place(request, now_s, arrival.cached_tokens(instance_id))
        if forgotten is not None:
            self._left(forgotten, instance_id)
        self._where[arrival.request_id] = _Where(instance_id, epoch, Phase.PREFILL)
        self._touch(instance_id)

    def migration_opened(self, request: RequestView, target_id: str | None) -> bool:
        """Note an open migration of the request, and the room that it will take; `target_id` None: not known
        yet. False: there is one already."""
        request_id = request.request_id
        if request_id in self._migrating:
            return False
        self._migrating[request_id] = (request.instance_id, target_id)
        self._mark(request_id, True)
        source, target = self._tracked.get(request.instance_id), self._tracked.get(target_id or "")
        if source is not None:
            source.leaving(request_id)
        if target is not None:
            target.coming(request_id, request.context_tokens)
            self._touch(target.record.instance_id)
        return True

    def migration_closed(self, request_id: str) -> None:
        """The open migration of the request is over."""
        for name in self._migrating.pop(request_id, ()):
            tracked = self._tracked.get(name or "")
            if tracked is not None:
                tracked.migrated(request_id)
                self._touch(tracked.record.instance_id)
        self._mark(request_id, False)

    def pool_ordered(self, instance_id: str, pool: Pool | None) -> PoolOrder | None:
        """An order to move an instance to a pool goes out. It counts until etcd tells that the instance has
        moved: what is decided meanwhile must not order the next one for the same reason.

        None: there is one already, or no such instance.
        """
        if instance_id in self._ordered or instance_id not in self._tracked:
            return None
        order = self._ordered[instance_id] = PoolOrder(instance_id, self._pools.get(instance_id), pool)
        self._touch(instance_id)
        return order

    def pool_settled(self, order: PoolOrder) -> None:
        """The order counts no longer, if it still does: the instance is where etcd says."""
        if self._ordered.get(order.instance_id) is order:
            del self._ordered[order.instance_id]
            self._touch(order.instance_id)

    def keep_lengths(self, period_s: float | None, now_s: float) -> None:
        """Keep the lengths of the requests of so many seconds from now on; None: of none."""
        if period_s != (self._lengths.period_s if self._lengths is not None else None):
            self._lengths = LengthWindow(period_s, now_s) if period_s is not None else None

    # ---- what is known

    def lengths(self, now_s: float) -> LengthStatistics | None:
        """Those that are kept; never change once given."""
        return self._lengths.statistics(now_s) if self._lengths is not None else None

    def view(self) -> ClusterView:
        """The cluster now; never changes once given."""
        if self._view is None:
            for name in self._dirty:
                self._views[name] = self._instance_view(name)
            self._dirty.clear()
            self._view = ClusterView(MappingProxyType(dict(self._views)), self._stages)
        return self._view

    def view_of_model(self, model: str) -> ClusterView:
        """The cluster as a request of this model may see it: instances of other models are not in it."""
        return self._view_of(self._groups.running(model))

    def view_of_kv(self, instance_id: str) -> ClusterView:
        """The cluster as a request on this instance may see it: where its KV cannot go is not in it."""
        return self._view_of(self._groups.exchanging_kv(instance_id))

    def view_of_answers(self, instance_id: str) -> ClusterView:
        """The cluster as a request that must leave this instance sees it: where it can go on at all."""
        return self._view_of(self._groups.going_on(instance_id))

    def can_exchange_kv(self, one: str, other: str) -> bool:
        """Whether a request can migrate from one instance to the other."""
        return other in self._groups.exchanging_kv(one)

    def tracked(self, instance_id: str) -> Tracked | None:
        """An instance, or None."""
        return self._tracked.get(instance_id)

    def traceparent(self, request_id: str) -> str:
        """The trace context of a request, as its instance reports it; "" when it is not traced."""
        where = self._where.get(request_id)
        tracked = self._tracked.get(where.instance_id) if where is not None else None
        return tracked.traceparents.get(request_id, "") if tracked is not None else ""

    def request(self, request_id: str) -> RequestView | None:
        """A request where it is now, or None."""
        where = self._where.get(request_id)
        tracked = self._tracked.get(where.instance_id) if where is not None else None
        if tracked is None:
            return None
        return tracked.find(request_id)

    def requests(self) -> Iterable[RequestView]:
        """Every request once, where it is now."""
        return (request for name in list(self._where) if (request := self.request(name)) is not None)

    def requests_on(self, instance_id: str) -> list[RequestView]:
        """The requests that an instance has now; not those that have moved on but are still reported."""
        tracked = self._tracked.get(instance_id)
        if tracked is None:
            return []
        held = [*tracked.requests.values(), *(p.request for p in tracked.pending.values())]
        return [
            request
            for request in held
            if (where := self._where.get(request.request_id)) is not None and where.instance_id == instance_id
        ]

    # ---- inside

    def _view_of(self, names: frozenset[str]) -> ClusterView:
        view = self.view()
        if len(names) == len(view.instances):
            return view
        made = self._partial.get(names)
        if made is None or made[0] is not view:
            instances = {name: instance for name, instance in view.instances.items() if name in names}
            stages = tuple(
                dataclasses.replace(stage, instance_ids=tuple(n for n in stage.instance_ids if n in names))
                for stage in view.stages
            )
            made = self._partial[names] = view, ClusterView(MappingProxyType(instances), stages)
        return made[1]

    def _note_arrived(self, request: RequestView, now_s: float) -> None:
        if self._lengths is not None:
            self._lengths.arrived(request.prompt_tokens, now_s)

    def _note_finished(self, tracked: Tracked, event: monitor_pb2.PhaseEvent, now_s: float) -> None:
        """Only of one that made its last token here the event says how many there were."""
        request = tracked.find(event.request_id)
        if self._lengths is not None and request is not None and event.output_tokens:
            self._lengths.finished(request.prompt_tokens, event.output_tokens, now_s)

    def _seen(self, request: RequestView, changes: list[PhaseChange], now_s: float) -> None:
        """A steady report shows a request. An event may have been lost: it then tells of the phase too."""
        if request.request_id in self._where:
            self._entered(request, changes, now_s)
        else:
            self._came(request, now_s)
            self._where[request.request_id] = _Where(request.instance_id, request.epoch, request.phase)

    def _came(self, request: RequestView, now_s: float) -> None:
        """It was placed by another scheduler; or it was handed over, which later epochs tell."""
        if not request.epoch:
            self._note_arrived(request, now_s)

    def _entered(self, request: RequestView, changes: list[PhaseChange], now_s: float) -> None:
        where = self._where.get(request.request_id)
        if where is None:
            self._came(request, now_s)
            self._where[request.request_id] = _Where(request.instance_id, request.epoch, request.phase)
            # Placed by another scheduler: which phase it was in follows from which it has entered.
            first = request.phase is not Phase.ANSWERING or request.output_tokens <= 1
            left = Phase.PREFILL if first else Phase.REASONING
        else:
            # A handed-over request is still reported by its source for a moment, with the older epoch.
            if request.instance_id != where.instance_id and request.epoch <= where.epoch:
                return
            left = where.phase
            where.instance_id, where.epoch, where.phase = request.instance_id, request.epoch, request.phase
        if left is not request.phase and request.phase is not Phase.PREFILL:
            changes.append(PhaseChange(request, left))

    def _left(self, request_id: str, instance_id: str) -> None:
        where = self._where.get(request_id)
        if where is not None and where.instance_id == instance_id:
            del self._where[request_id]

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._where[request_id]

    def _mark(self, request_id: str, migrating: bool) -> None:
        where = self._where.get(request_id)
        if where is not None and (tracked := self._tracked.get(where.instance_id)) is not None:
            tracked.mark(request_id, migrating)
            self._touch(where.instance_id)

    def _instance_state(self, name: str) -> InstanceState:
        if name in self._suspects or name in self._silent:
            return InstanceState.SUSPECT
        return InstanceState.DRAINING if name in self._draining else InstanceState.ACTIVE

    def _instance_view(self, name: str) -> InstanceView:
        tracked = self._tracked[name]
        _, measured = self._measured.get(tracked.record.profile_kind, (None, None))
        return tracked.view(self._instance_state(name), self._pool(name), measured)

    def _pool(self, name: str) -> Pool | None:
        order = self._ordered.get(name)
        return self._pools.get(name) if order is None else order.pool

    def _touch(self, name: str) -> None:
        self._dirty.add(name)
        self._view = None

    def _rebuild(self) -> None:
        self._views = {name: self._instance_view(name) for name in self._tracked}
        self._dirty.clear()
        self._view = None
