"""The cluster as live workers report it: membership and reports, kept incrementally.

Pure: no I/O; the caller brings the time, in seconds of its monotonic clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from tailrace.actions import CopyPrefix
from tailrace.cache.recent import RecentPrefixes
from tailrace.cluster import (
    Arrival,
    CachedTokens,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
    Stage,
)
from tailrace.control.cluster_model import ClusterModel, ModelGroups
from tailrace.control.hot_prefixes import HotTracker
from tailrace.control.known_cache import KnownCache
from tailrace.control.recording import (
    CacheListed,
    CopyOrdered,
    CopySettled,
    InstanceKnown,
    MembersChanged,
    MigrationClosed,
    MigrationOpened,
    ModelKnown,
    PoolOrdered,
    PoolSettled,
    RecentState,
    RecordedMembers,
    RecordedPlacement,
    RecordedWhere,
    ReportsStopped,
    Tap,
)
from tailrace.control.reported_instance import ReportedInstance
from tailrace.intra.base import QUANTUM_TOKENS
from tailrace.lengths import LengthWindow
from tailrace.perf.measured import Measured
from tailrace.records import InstanceRecord, ProfileRecord
from tailrace.v1 import cache_pb2, monitor_pb2, types_pb2


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
class Where:
    """Who has a request, as far as reports tell."""

    instance_id: str
    epoch: int
    phase: Phase


class ReportedCluster(ClusterModel[ReportedInstance]):
    """Everything known of instances and requests."""

    def __init__(self) -> None:
        super().__init__()
        # Gets what happens, while it is recorded; but for reports and placements, which LiveControl tells.
        self.tap: Tap | None = None
        # Where prefixes are.
        self.cache = KnownCache()
        self.hot = HotTracker(self)
        self._quantum_tokens = QUANTUM_TOKENS
        self._where: dict[str, Where] = {}
        # Open migrations by request: from where, and to where if that is known.
        self._migrating: dict[str, tuple[str, str | None]] = {}
        self._silent: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._draining: frozenset[str] = frozenset()
        self._pools: Mapping[str, Pool] = {}
        # Orders that etcd does not tell of yet, by instance.
        self._ordered: dict[str, PoolOrder] = {}
        # By kind of instance, beside the records that they were made from.
        self._measured: dict[str, tuple[ProfileRecord, Measured]] = {}
        self._view: ClusterView | None = None
        self._groups = ModelGroups({})
        # Views of some of the instances, by which, beside the view of all that they were made from.
        self._partial: dict[frozenset[str], tuple[ClusterView, ClusterView]] = {}

    # ---- what happens

    def set_members(self, members: Members, now_s: float) -> None:
        """Take over membership, pools, drains, stages and profiles. A new incarnation starts from nothing."""
        if self.tap is not None:
            self.tap(MembersChanged(_recorded(members), now_s))
        tracked: dict[str, ReportedInstance] = {}
        for name in sorted(members.instances):
            record = members.instances[name]
            known = self._known.get(name)
            if known is None or known.record.incarnation != record.incarnation:
                known = ReportedInstance(record, now_s, self._quantum_tokens)
                self._forget([r for r, where in self._where.items() if where.instance_id == name])
            known.record = record
            tracked[name] = known
        self._known = tracked
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
            self.recount()

    def set_silent(self, names: Collection[str]) -> None:
        """Take over which instances have stopped reporting.

        When all have, it is the monitor that hears nothing; who is alive the front ends know better.
        """
        silent = frozenset(names)
        if self.tap is not None:
            self.tap(ReportsStopped(sorted(silent)))
        if silent >= self._known.keys():
            silent = frozenset()
        if silent != self._silent:
            self._silent = silent
            self._rebuild()

    def apply(self, report: monitor_pb2.WorkerReport, now_s: float) -> list[PhaseChange]:
        """Take one report in; what it tells of phases, in order. Reports of unknown instances are ignored."""
        tracked = self._known.get(report.instance_id)
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

    def place(
        self, arrival: Arrival, instance_id: str, frontend_id: str, now_s: float, pull_from: str = ""
    ) -> None:
        """Count a placement in before any report shows it, so that a burst does not pile up.

        `pull_from`: as in Place.
        """
        tracked = self._known.get(instance_id)
        if tracked is None:
            return
        where = self._where.get(arrival.request_id)
        if where is not None and (before := self._known.get(where.instance_id)) is not None:
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
            self.note_arrived(request.prompt_tokens, now_s)
        self.cache.placed(instance_id, arrival.block_names, now_s)
        forgotten = tracked.place(request, now_s, arrival.found_tokens(instance_id, pull_from))
        if forgotten is not None:
            self._left(forgotten, instance_id)
        self._where[arrival.request_id] = Where(instance_id, epoch, Phase.PREFILL)
        self._touch(instance_id)

    def migration_opened(self, request: RequestView, target_id: str | None) -> bool:
        """Note an open migration of the request, and the room that it will take; `target_id` None: not known
        yet. False: there is one already."""
        request_id = request.request_id
        if request_id in self._migrating:
            return False
        if self.tap is not None:
            self.tap(MigrationOpened(request, target_id))
        self._migrating[request_id] = (request.instance_id, target_id)
        self._mark(request_id, True)
        source, target = self._known.get(request.instance_id), self._known.get(target_id or "")
        if source is not None:
            source.open_departure(request_id)
        if target is not None:
            target.expect(request_id, request.context_tokens)
            self._touch(target.record.instance_id)
        return True

    def migration_closed(self, request_id: str) -> None:
        """The open migration of the request is over."""
        if self.tap is not None:
            self.tap(MigrationClosed(request_id))
        for name in self._migrating.pop(request_id, ()):
            tracked = self._known.get(name or "")
            if tracked is not None:
                tracked.close_migration(request_id)
                self._touch(tracked.record.instance_id)
        self._mark(request_id, False)

    def pool_ordered(self, instance_id: str, pool: Pool | None) -> PoolOrder | None:
        """An order to move an instance to a pool goes out. It counts until etcd tells that the instance has
        moved: what is decided meanwhile must not order the next one for the same reason.

        None: there is one already, or no such instance.
        """
        if instance_id in self._ordered or instance_id not in self._known:
            return None
        if self.tap is not None:
            self.tap(PoolOrdered(instance_id, pool))
        order = self._ordered[instance_id] = PoolOrder(instance_id, self._pools.get(instance_id), pool)
        self._touch(instance_id)
        return order

    def pool_settled(self, order: PoolOrder) -> None:
        """The order counts no longer, if it still does: the instance is where etcd says."""
        if self._ordered.get(order.instance_id) is order:
            self.settle_pool(order.instance_id)

    def settle_pool(self, instance_id: str) -> None:
        """No order for the instance counts any longer."""
        if self.tap is not None:
            self.tap(PoolSettled(instance_id))
        self._ordered.pop(instance_id, None)
        self._touch(instance_id)

    def copy_ordered(self, copy: CopyPrefix, now_s: float) -> bool:
        """A copy of a prefix goes out; False: it must not, or nothing is known of the prefix any more."""
        request = self.request(copy.request_id)
        known = request is not None and request.instance_id == copy.holder_id
        if not known or not self.can_exchange_kv(copy.holder_id, copy.target_id):
            return False
        if not self.hot.ordered(copy, now_s):
            return False
        if self.tap is not None:
            self.tap(CopyOrdered(copy, now_s))
        return True

    def copy_settled(self, target_id: str, now_s: float) -> None:
        """The copy to that instance is over, whatever came of it."""
        if self.tap is not None:
            self.tap(CopySettled(target_id, now_s))
        self.hot.settled(target_id, now_s)

    def cache_listed(self, instance_id: str, reply: cache_pb2.ListCacheReply) -> None:
        """An instance has told all that its prefix cache holds."""
        if self.tap is not None:
            self.tap(CacheListed(instance_id, reply.SerializeToString()))
        self.cache.listed(instance_id, reply)

    # ---- what is known

    def view(self) -> ClusterView:
        """The cluster now; never changes once given."""
        if self._view is None:
            self._renew(self._dirty)
            self._dirty.clear()
            self._view = ClusterView(MappingProxyType(dict(self._views)), self._stages)
        return self._view

    def view_at(self, now_s: float) -> ClusterView:
        """The same: between two reports time changes nothing."""
        return self.view()

    def view_for_arrival(self, model: str, now_s: float) -> ClusterView:
        """Instances of other models are not in it."""
        return self.view_of_model(model)

    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView:
        """Where its KV cannot go is not in it."""
        return self.view_of_kv(instance_id)

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

    # ---- KnowsPrefixes (tailrace/control/hot_prefixes.py)

    def located(self, request_id: str) -> str | None:
        """The instance that has the request, as far as reports tell."""
        where = self._where.get(request_id)
        return None if where is None else where.instance_id

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        """Tokens of these blocks that each instance holds."""
        return self.cache.of_arrival(names, block_tokens, len(names) * block_tokens + 1, now_s)

    def exchanging(self, instance_id: str) -> Collection[str]:
        """Instances that can take KV from this one, itself among them."""
        return self._groups.exchanging_kv(instance_id)

    @property
    def pending_placements(self) -> int:
        """Requests placed of which no report has told yet."""
        return sum(len(known.pending) for known in self._known.values())

    def tracked(self, instance_id: str) -> ReportedInstance | None:
        """An instance, or None."""
        return self._known.get(instance_id)

    def traceparent(self, request_id: str) -> str:
        """The trace context of a request, as its instance reports it; "" when it is not traced."""
        where = self._where.get(request_id)
        tracked = self._known.get(where.instance_id) if where is not None else None
        return tracked.traceparents.get(request_id, "") if tracked is not None else ""

    def request(self, request_id: str) -> RequestView | None:
        """A request where it is now, or None."""
        where = self._where.get(request_id)
        tracked = self._known.get(where.instance_id) if where is not None else None
        if tracked is None:
            return None
        return tracked.find(request_id)

    def requests(self) -> Iterable[RequestView]:
        """Every request once, where it is now."""
        return (request for name in list(self._where) if (request := self.request(name)) is not None)

    def requests_on(self, instance_id: str) -> list[RequestView]:
        """The requests that an instance has now; not those that have moved on but are still reported."""
        tracked = self._known.get(instance_id)
        if tracked is None:
            return []
        held = [*tracked.requests.values(), *(p.request for p in tracked.pending.values())]
        return [
            request
            for request in held
            if (where := self._where.get(request.request_id)) is not None and where.instance_id == instance_id
        ]

    # ---- recordings

    def state(self) -> tuple[ModelKnown, list[InstanceKnown]]:
        """All that is known, in a form that `restore` takes."""
        members = RecordedMembers(
            {name: known.record for name, known in self._known.items()},
            dict(self._pools),
            self._draining,
            self._suspects,
            self._stages,
            {kind: record for kind, (record, _) in self._measured.items()},
        )
        recent = self.hot.recent
        model = ModelKnown(
            members,
            self._silent,
            [RecordedWhere(name, w.instance_id, w.epoch, w.phase) for name, w in self._where.items()],
            dict(self._migrating),
            [(order.instance_id, order.before, order.pool) for order in self._ordered.values()],
            self._lengths.state() if self._lengths is not None else None,
            [RecordedPlacement(at_s, name, list(names)) for at_s, name, names in self.cache.recent],
            None if recent is None else RecentState(recent.period_s, recent.arrivals),
            self.hot.copies,
        )
        # What is counted incrementally is counted anew, here as where it is restored: in the same order.
        self.recount()
        follower = self.cache.follower
        return model, [known.state(follower.state(name)) for name, known in self._known.items()]

    def restore(self, model: ModelKnown, instances: Iterable[InstanceKnown], now_s: float) -> None:
        """Go on from there; nothing must be known yet."""
        self.set_members(model.members, now_s)
        for state in instances:
            self._known[state.instance_id].restore(state)
            if state.cache is not None:
                self.cache.follower.restore(state.instance_id, state.cache)
        for placed in model.placed:
            self.cache.placed(placed.instance_id, placed.names, placed.placed_s)
        recent = model.recent
        self.hot.restore(
            None if recent is None else RecentPrefixes(recent.period_s, recent.arrivals), model.copies
        )
        self._silent = model.silent
        self._where = {w.request_id: Where(w.instance_id, w.epoch, w.phase) for w in model.where}
        self._migrating = dict(model.migrating)
        self._ordered = {name: PoolOrder(name, before, pool) for name, before, pool in model.ordered}
        self._lengths = LengthWindow.restored(model.lengths) if model.lengths is not None else None
        self._rebuild()

    def recount(self) -> None:
        """Count anew what is counted as requests come and go."""
        for known in self._known.values():
            known.count_by(self._quantum_tokens)
        self._rebuild()

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

    def _note_finished(self, tracked: ReportedInstance, event: monitor_pb2.PhaseEvent, now_s: float) -> None:
        """Only of one that made its last token here the event says how many there were."""
        request = tracked.find(event.request_id)
        if request is not None and event.output_tokens:
            self.note_finished(request.prompt_tokens, event.output_tokens, now_s)

    def _seen(self, request: RequestView, changes: list[PhaseChange], now_s: float) -> None:
        """A steady report shows a request. An event may have been lost: it then tells of the phase too."""
        if request.request_id in self._where:
            self._entered(request, changes, now_s)
        else:
            self._note_arrival(request, now_s)
            self._where[request.request_id] = Where(request.instance_id, request.epoch, request.phase)

    def _note_arrival(self, request: RequestView, now_s: float) -> None:
        """It was placed by another scheduler; or it was handed over, which later epochs tell."""
        if not request.epoch:
            self.note_arrived(request.prompt_tokens, now_s)

    def _entered(self, request: RequestView, changes: list[PhaseChange], now_s: float) -> None:
        where = self._where.get(request.request_id)
        if where is None:
            self._note_arrival(request, now_s)
            self._where[request.request_id] = Where(request.instance_id, request.epoch, request.phase)
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
        if where is not None and (tracked := self._known.get(where.instance_id)) is not None:
            tracked.mark(request_id, migrating)
            self._touch(where.instance_id)

    def _instance_state(self, name: str) -> InstanceState:
        if name in self._suspects or name in self._silent:
            return InstanceState.SUSPECT
        return InstanceState.DRAINING if name in self._draining else InstanceState.ACTIVE

    def _instance_view(self, name: str) -> InstanceView:
        tracked = self._known[name]
        _, measured = self._measured.get(tracked.record.profile_kind, (None, None))
        return tracked.view(self._instance_state(name), self._pool(name), measured)

    def _pool(self, name: str) -> Pool | None:
        order = self._ordered.get(name)
        return self._pools.get(name) if order is None else order.pool

    def _touch(self, name: str) -> None:
        self._dirty.add(name)
        self._view = None

    def _rebuild(self) -> None:
        self._views = {name: self._instance_view(name) for name in self._known}
        self._dirty.clear()
        self._view = None


def _recorded(members: Members) -> RecordedMembers:
    return RecordedMembers(
        dict(members.instances),
        dict(members.pools),
        members.draining,
        members.suspects,
        members.stages,
        dict(members.profiles),
    )
