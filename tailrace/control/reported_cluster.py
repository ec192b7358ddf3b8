"""The cluster model of the live scheduler: membership and worker reports, maintained incrementally.

Pure: no I/O; callers pass the time in seconds of their monotonic clock.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

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
    ViewChanges,
)
from tailrace.control.cluster_model import ClusterModel, ModelGroups, PartialViews
from tailrace.control.events import (
    Arrived,
    CacheListed,
    CopyOrdered,
    CopySettled,
    Input,
    KnownMembers,
    MembersChanged,
    MigrationClosed,
    MigrationOpened,
    Order,
    PoolOrdered,
    PoolSettled,
    Reported,
    ReportsStopped,
    Ticked,
)
from tailrace.control.hot_prefixes import HotTracker
from tailrace.control.known_cache import KnownCache
from tailrace.control.recent_answers import FinishedAnswer, RecentAnswers
from tailrace.control.recording import (
    InstanceKnown,
    ModelKnown,
    RecentState,
    RecordedPlacement,
    RecordedWhere,
)
from tailrace.control.reported_instance import UNREPORTED_S, ReportedInstance
from tailrace.lengths import LengthStatistics, LengthWindow
from tailrace.perf.measured import Measured
from tailrace.records import InstanceRecord, ProfileRecord
from tailrace.v1 import monitor_pb2, types_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseChange:
    """A request ended the phase `left` and entered another."""

    request: RequestView
    left: Phase


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PoolOrder:
    """An order to move an instance between pools."""

    instance_id: str
    before: Pool | None
    pool: Pool | None


@dataclasses.dataclass(slots=True)
class RequestLocation:
    """The instance that has a request according to reports."""

    instance_id: str
    epoch: int
    phase: Phase

    def equals(self, instance_id: str, epoch: int, phase: Phase) -> bool:
        """Return whether the request is there, with this epoch and in this phase."""
        return self.phase is phase and self.epoch == epoch and self.instance_id == instance_id


class ReportedCluster(ClusterModel[ReportedInstance]):
    """Hold everything known of instances and requests."""

    def __init__(self) -> None:
        super().__init__()
        # Gets each event before it is applied, while a recording runs.
        self.tap: Callable[[Input], None] | None = None
        # Which instance caches which prefix.
        self.cache = KnownCache()
        self.hot = HotTracker(self)
        self.recent = RecentAnswers()
        # When the last steady report of any instance was applied; None: never.
        self._heard_s: float | None = None
        self._locations: dict[str, RequestLocation] = {}
        # Recent placements, oldest first: time, request and instance.
        self._placed: deque[tuple[float, str, str]] = deque()
        # Open migrations by request: source, and target if known.
        self._migrating: dict[str, tuple[str, str | None]] = {}
        self._records: Mapping[str, InstanceRecord] = {}
        self._profiles: Mapping[str, ProfileRecord] = {}
        self._silent: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._draining: frozenset[str] = frozenset()
        self._pools: Mapping[str, Pool] = {}
        # Orders that etcd's watch has not confirmed yet, by instance.
        self._pool_orders: dict[str, PoolOrder] = {}
        # By kind of instance, each with the record it was made from.
        self._measured: dict[str, tuple[ProfileRecord, Measured]] = {}
        self._view: ClusterView | None = None
        # Between views of the same instances.
        self._changes = ViewChanges()
        self._groups = ModelGroups({})
        # Increases with each change of the membership.
        self.memberships = 0
        self._partial = PartialViews()
        # Lengths of recent requests by model, for the desired number of instances; no decision depends on
        # them. None: not kept.
        self._demand_s: float | None = None
        self._demand: dict[str, LengthWindow] = {}

    # ---- what happens

    def apply(self, event: Input) -> list[PhaseChange]:
        """Apply an event; return the phase changes that it shows, in order. Only reports show any.

        Events that concern the policy alone change nothing here.
        """
        if self.tap is not None:
            self.tap(event)
        match event:
            case Reported():
                return self._apply_report(event.report, event.now_s)
            case MembersChanged():
                self._set_members(event.members, event.now_s)
            case ReportsStopped():
                self._set_silent(event.instance_ids)
            case CacheListed():
                self.cache.listed(event.instance_id, event.reply)
            case MigrationOpened():
                self._open_migration(event.request, event.target_id)
            case MigrationClosed():
                self._close_migration(event.request_id)
            case PoolOrdered():
                self._order_pool(event.instance_id, event.pool)
            case PoolSettled():
                self._pool_orders.pop(event.instance_id, None)
                self._mark_dirty(event.instance_id)
            case CopyOrdered():
                self.hot.add_copy(event.copy, event.now_s)
            case CopySettled():
                self.hot.end_copy(event.target_id, event.now_s)
            case Arrived() | Ticked():
                self._forget_unreported(event.now_s)
            case _:
                pass
        return []

    def order(self, event: Order) -> bool:
        """Apply an order unless it contradicts what is known or ordered; return whether it was applied."""
        match event:
            case MigrationOpened():
                possible = event.request.request_id not in self._migrating
            case PoolOrdered():
                possible = event.instance_id in self._known and event.instance_id not in self._pool_orders
            case CopyOrdered():
                possible = self._may_copy(event.copy, event.now_s)
        if possible:
            self.apply(event)
        return possible

    def _set_members(self, members: KnownMembers, now_s: float) -> None:
        """Apply membership, pools, drains, stages and profiles. A new incarnation starts empty.

        Arrow moves instances between pools all the time: only those whose state or pool has changed get new
        views then.
        """
        if members.instances == self._records and members.profiles == self._profiles:
            self._set_states_and_pools(members)
        else:
            self._set_instances(members, now_s)
            self._set_states_and_pools(members)
            self._rebuild()
        self.memberships += 1

    def _set_states_and_pools(self, members: KnownMembers) -> None:
        changed = (self._suspects ^ members.suspects) | (self._draining ^ members.draining)
        changed |= {name for name, _ in self._pools.items() ^ members.pools.items()}
        orders = {
            name: order
            for name, order in self._pool_orders.items()
            if name in self._known and members.pools.get(name) is self._pools.get(name)
        }
        changed |= self._pool_orders.keys() - orders.keys()
        self._suspects, self._draining, self._pools = members.suspects, members.draining, members.pools
        self._pool_orders, self._stages = orders, members.stages
        self._dirty |= changed & self._known.keys()
        self._view = None

    def _set_instances(self, members: KnownMembers, now_s: float) -> None:
        self._records, self._profiles = members.instances, members.profiles
        tracked: dict[str, ReportedInstance] = {}
        for name in sorted(members.instances):
            record = members.instances[name]
            known = self._known.get(name)
            if known is None or known.record.incarnation != record.incarnation:
                known = ReportedInstance(record, now_s)
                self._forget([r for r, location in self._locations.items() if location.instance_id == name])
            known.record = record
            tracked[name] = known
        self._known = tracked
        self.cache.set_instances(members.instances)
        self.recent.keep_instances(members.instances)
        self._groups = ModelGroups(members.instances)
        models = {record.model for record in members.instances.values()}
        self._demand = {model: window for model, window in self._demand.items() if model in models}
        self._partial.clear()
        self._forget([r for r, location in self._locations.items() if location.instance_id not in tracked])
        self._measured = {
            kind: cached
            if (cached := self._measured.get(kind)) is not None and cached[0] is record
            else (record, Measured.of(record))
            for kind, record in members.profiles.items()
        }

    def _set_silent(self, names: Collection[str]) -> None:
        """Set which instances have stopped reporting.

        If all have, the monitor receives nothing, and front ends know better which instances are alive.
        """
        silent = frozenset(names)
        if silent >= self._known.keys():
            silent = frozenset()
        for name in (silent ^ self._silent) & self._known.keys():
            self._mark_dirty(name)
        self._silent = silent

    def _apply_report(self, report: monitor_pb2.WorkerReport, now_s: float) -> list[PhaseChange]:
        """Apply a report; return the phase changes that it shows, in order. Unknown instances are ignored."""
        tracked = self._known.get(report.instance_id)
        if tracked is None or tracked.record.incarnation != report.incarnation:
            return []
        self.cache.apply(report)
        changes: list[PhaseChange] = []
        if report.HasField("load"):
            self._heard_s = now_s
            gone = tracked.apply_steady(report, self._migrating.keys(), now_s)
            for request_id in gone:
                self._request_left(request_id, report.instance_id)
            self._requests_reported(tracked, changes, now_s)
        for event in report.phase_events:
            if event.phase == types_pb2.PHASE_UNSPECIFIED:
                self._count_finish(tracked, event, now_s)
                self._count_recent(tracked, event, now_s)
                tracked.finish(event.request_id)
                self._request_left(event.request_id, report.instance_id)
            elif (entered := tracked.enter_phase(event)) is not None:
                self._phase_entered(entered, changes, now_s)
        self._mark_dirty(report.instance_id)
        return changes

    def place(self, arrival: Arrival, instance_id: str, now_s: float, pull_from: str = "") -> None:
        """Add a placement before any report shows it, so that a burst does not pile up. `pull_from`: as in
        Place."""
        tracked = self._known.get(instance_id)
        if tracked is None:
            return
        location = self._locations.get(arrival.request_id)
        if location is not None and (before := self._known.get(location.instance_id)) is not None:
            before.remove_pending(arrival.request_id)
            before.unsettle(arrival.request_id)
            self._mark_dirty(location.instance_id)
        epoch = location.epoch if location is not None else 0
        request = RequestView(
            request_id=arrival.request_id,
            instance_id=instance_id,
            phase=Phase.PREFILL,
            state=RequestState.WAITING,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            max_tokens=arrival.max_tokens,
            epoch=epoch,
            frontend_id=arrival.frontend_id,
        )
        found_tokens = arrival.found_tokens(instance_id, pull_from)
        if location is None and not arrival.output_tokens:
            self._count_arrival(tracked, request.prompt_tokens, now_s, found_tokens)
        self.cache.placed(instance_id, arrival.block_names, now_s)
        forgotten = tracked.place(request, now_s, found_tokens)
        if forgotten is not None:
            self._request_left(forgotten, instance_id)
        self._placed.append((now_s, arrival.request_id, instance_id))
        self._locations[arrival.request_id] = RequestLocation(instance_id, epoch, Phase.PREFILL)
        self._mark_dirty(instance_id)

    def _forget_unreported(self, now_s: float) -> None:
        """Forget placements that no report has confirmed or ruled out for long."""
        while self._placed and now_s - self._placed[0][0] > UNREPORTED_S:
            placed_s, request_id, instance_id = self._placed.popleft()
            tracked = self._known.get(instance_id)
            if tracked is not None and tracked.forget_unreported(request_id, placed_s):
                self._request_left(request_id, instance_id)
                self._mark_dirty(instance_id)

    def _open_migration(self, request: RequestView, target_id: str | None) -> None:
        """Add an open migration of the request and the KV that it will take. `target_id` None: not known
        yet."""
        request_id = request.request_id
        self._migrating[request_id] = (request.instance_id, target_id)
        self._set_migrating(request_id, True)
        source, target = self._known.get(request.instance_id), self._known.get(target_id or "")
        if source is not None:
            source.open_departure(request_id)
        if target is not None:
            target.reserve(request_id, request.context_tokens)
            self._mark_dirty(target.record.instance_id)

    def _close_migration(self, request_id: str) -> None:
        """Remove the open migration of the request."""
        for name in self._migrating.pop(request_id, ()):
            tracked = self._known.get(name or "")
            if tracked is not None:
                tracked.close_migration(request_id)
                self._mark_dirty(tracked.record.instance_id)
        self._set_migrating(request_id, False)

    def _order_pool(self, instance_id: str, pool: Pool | None) -> None:
        """Add an order to move an instance to a pool.

        The order counts until etcd confirms it: decisions meanwhile must not order the next move for the same
        reason.
        """
        self._pool_orders[instance_id] = PoolOrder(instance_id, self._pools.get(instance_id), pool)
        self._mark_dirty(instance_id)

    def _may_copy(self, copy: CopyPrefix, now_s: float) -> bool:
        """Return whether a prefix is known and may be copied, and its target receives no copy yet."""
        request = self.request(copy.request_id)
        known = request is not None and request.instance_id == copy.holder_id
        return (
            known and self.can_exchange_kv(copy.holder_id, copy.target_id) and self.hot.may_copy(copy, now_s)
        )

    # ---- queries

    def is_out_of_date(self, now_s: float) -> bool:
        """Return whether no report has come for long, as while no monitor runs."""
        return self._heard_s is None or now_s - self._heard_s > UNREPORTED_S

    def view(self) -> ClusterView:
        """Return the cluster now, as an immutable view."""
        if self._view is None:
            self._renew(self._dirty)
            self._changes.add(self._dirty)
            self._dirty.clear()
            views = MappingProxyType(dict(self._views))
            self._view = ClusterView(
                views, self._stages, changes=self._changes, version=self._changes.version
            )
        return self._view

    def view_at(self, now_s: float) -> ClusterView:
        """Return the same view: between two reports, time changes nothing."""
        return self.view()

    def view_for_arrival(self, model: str, now_s: float) -> ClusterView:
        """Return the view that contains instances of this model only."""
        return self._partial.of(self.view(), self._groups.running(model))

    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView:
        """Return the view that contains only instances that can take KV from this one."""
        return self._partial.of(self.view(), self._groups.exchanging_kv(instance_id))

    def view_for_replay(self, instance_id: str) -> ClusterView:
        """Return the view that contains the instances able to continue this one's requests, by replay if not
        live."""
        return self._partial.of(self.view(), self._groups.able_to_continue(instance_id))

    def can_exchange_kv(self, one: str, other: str) -> bool:
        """Return whether a request can migrate live from one instance to the other."""
        return other in self._groups.exchanging_kv(one)

    # ---- demand, by model as instances name it (InstanceRecord.model)

    def keep_demand(self, period_s: float) -> None:
        """Keep the lengths of the requests of each model of the last `period_s` seconds from now on."""
        self._demand_s = period_s

    def demand(self, model: str, now_s: float) -> LengthStatistics:
        """Return the lengths of a model's recent requests: arrived prompts without what was cached of them,
        and finished requests."""
        window = self._demand_of(model, now_s)
        return LengthStatistics.of(0.0, (), ()) if window is None else window.statistics(now_s)

    def instances_of(self, model: str) -> list[InstanceView]:
        """Return the instances of a model now."""
        views = self.view().instances
        return [views[name] for name, record in self._records.items() if record.model == model]

    def count_refused(self, model: str, prompt_tokens: int, now_s: float) -> None:
        """Count a request as demand that was refused because it would be late. `model`: key of the model
        that may answer; empty: any."""
        running = min(self._groups.running(model), default=None)
        if running is None:
            return
        if (demand := self._demand_of(self._records[running].model, now_s)) is not None:
            demand.arrived(prompt_tokens, now_s)

    # ---- PrefixSource (tailrace/control/hot_prefixes.py)

    def located(self, request_id: str) -> str | None:
        """Return the instance that has the request according to reports."""
        location = self._locations.get(request_id)
        return None if location is None else location.instance_id

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        """Return the tokens of these blocks that each instance holds."""
        return self.cache.of_arrival(names, block_tokens, len(names) * block_tokens + 1, now_s)

    def exchanging(self, instance_id: str) -> Collection[str]:
        """Return the instances that can take KV from this one; itself among them."""
        return self._groups.exchanging_kv(instance_id)

    @property
    def pending_placements(self) -> int:
        """Return the number of placements that no report shows yet."""
        return sum(len(known.pending) for known in self._known.values())

    def pool_order(self, instance_id: str) -> PoolOrder | None:
        """Return the order to move an instance that etcd has not confirmed yet, or None."""
        return self._pool_orders.get(instance_id)

    def tracked(self, instance_id: str) -> ReportedInstance | None:
        """Return an instance, or None."""
        return self._known.get(instance_id)

    def traceparent(self, request_id: str) -> str:
        """Return the trace context that the instance reports for a request; "" if it is not traced."""
        location = self._locations.get(request_id)
        tracked = self._known.get(location.instance_id) if location is not None else None
        return tracked.traceparent(request_id) if tracked is not None else ""

    def request(self, request_id: str) -> RequestView | None:
        """Return a request on its current instance, or None."""
        location = self._locations.get(request_id)
        tracked = self._known.get(location.instance_id) if location is not None else None
        if tracked is None:
            return None
        return tracked.find(request_id)

    def requests(self) -> Iterable[RequestView]:
        """Yield every request once, on its current instance."""
        return (request for name in list(self._locations) if (request := self.request(name)) is not None)

    def locations(self) -> list[RequestLocation]:
        """Return the location of every request, not to be changed."""
        return list(self._locations.values())

    def arrivals_on(self, instance_id: str, phase: Phase | None = None) -> list[tuple[str, float]]:
        """Return id and arrival (time of day in seconds; 0: not known) of the requests that `requests_on`
        returns, without making views; only of those in the phase, if one is given."""
        tracked = self._known.get(instance_id)
        if tracked is None:
            return []
        return [
            (request_id, arrival_s)
            for request_id, arrival_s in tracked.arrivals()
            if (location := self._locations.get(request_id)) is not None
            and location.instance_id == instance_id
            and (phase is None or location.phase is phase)
        ]

    def requests_on(self, instance_id: str) -> list[RequestView]:
        """Return the requests that an instance has now, without those that have moved on but are still
        reported."""
        tracked = self._known.get(instance_id)
        if tracked is None:
            return []
        return [
            request
            for request in tracked.requests()
            if (location := self._locations.get(request.request_id)) is not None
            and location.instance_id == instance_id
        ]

    # ---- recordings

    def state(self) -> tuple[ModelKnown, list[InstanceKnown]]:
        """Return the state that `restore` takes."""
        members = KnownMembers(
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
            [RecordedWhere(name, w.instance_id, w.epoch, w.phase) for name, w in self._locations.items()],
            dict(self._migrating),
            [(order.instance_id, order.before, order.pool) for order in self._pool_orders.values()],
            self._lengths.state() if self._lengths is not None else None,
            [RecordedPlacement(at_s, name, list(names)) for at_s, name, names in self.cache.recent],
            None if recent is None else RecentState(recent.period_s, recent.arrivals),
            self.hot.copies,
            self._heard_s,
        )
        follower = self.cache.follower
        instances = [known.state(follower.state(name)) for name, known in self._known.items()]
        self._rebuild()
        return model, instances

    def restore(self, model: ModelKnown, instances: Iterable[InstanceKnown], now_s: float) -> None:
        """Continue from a recorded state. The model must be new."""
        self._set_members(model.members, now_s)
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
        self._silent, self._heard_s = model.silent, model.heard_s
        self._locations = {
            w.request_id: RequestLocation(w.instance_id, w.epoch, w.phase) for w in model.where
        }
        self._placed = deque(
            sorted(
                (pending.placed, request_id, name)
                for name, known in self._known.items()
                for request_id, pending in known.pending.items()
            )
        )
        self._migrating = dict(model.migrating)
        self._pool_orders = {name: PoolOrder(name, before, pool) for name, before, pool in model.ordered}
        self._lengths = LengthWindow.restored(model.lengths) if model.lengths is not None else None
        self._rebuild()

    # ---- internal

    def _count_finish(self, tracked: ReportedInstance, event: monitor_pb2.PhaseEvent, now_s: float) -> None:
        """Count a request that finished here; only then the event has its number of tokens."""
        prompt_tokens = tracked.prompt_tokens(event.request_id) if event.output_tokens else None
        if prompt_tokens is not None:
            self.count_finish(prompt_tokens, event.output_tokens, now_s)
            if (demand := self._demand_of(tracked.record.model, now_s)) is not None:
                demand.finished(prompt_tokens, event.output_tokens, now_s)

    def _count_recent(self, tracked: ReportedInstance, event: monitor_pb2.PhaseEvent, now_s: float) -> None:
        """Count an answer that finished here, or a move away, unless the event comes again."""
        if tracked.prompt_tokens(event.request_id) is None:
            return
        instance_id = tracked.record.instance_id
        if event.moved_to_instance_id in self._known:
            self.recent.moved(instance_id, event.moved_to_instance_id, now_s)
        if event.HasField("answered") and (answer := FinishedAnswer.of(event.answered)) is not None:
            self.recent.finished(instance_id, answer, now_s)

    def _requests_reported(
        self,
        tracked: ReportedInstance,
        changes: list[PhaseChange],
        now_s: float,
    ) -> None:
        """Process the requests of a steady report, which also shows phase changes whose events were lost."""
        instance_id, locations = tracked.record.instance_id, self._locations
        for request_id, epoch, phase in tracked.to_check:
            location = locations.get(request_id)
            if location is None:
                if not epoch:
                    self._count_arrival(tracked, tracked.reported_prompt_tokens(request_id), now_s)
                locations[request_id] = RequestLocation(instance_id, epoch, phase)
            elif not location.equals(instance_id, epoch, phase):
                request = tracked.find(request_id)
                if request is not None:
                    self._phase_entered(request, changes, now_s)
                if not location.equals(instance_id, epoch, phase):
                    tracked.unsettle(request_id)

    def _count_arrival(
        self, tracked: ReportedInstance, prompt_tokens: int, now_s: float, found_tokens: int = 0
    ) -> None:
        """Count a request that arrived, and as demand what has to be computed of it there."""
        self.count_arrival(prompt_tokens, now_s)
        if (demand := self._demand_of(tracked.record.model, now_s)) is not None:
            demand.arrived(max(0, prompt_tokens - found_tokens), now_s)

    def _demand_of(self, model: str, now_s: float) -> LengthWindow | None:
        if self._demand_s is not None and model not in self._demand:
            self._demand[model] = LengthWindow(self._demand_s, now_s)
        return self._demand.get(model)

    def _phase_entered(self, request: RequestView, changes: list[PhaseChange], now_s: float) -> None:
        location = self._locations.get(request.request_id)
        if location is None:
            tracked = self._known.get(request.instance_id)
            # A later epoch means that it was handed over; otherwise another scheduler placed it.
            if tracked is not None and not request.epoch:
                self._count_arrival(tracked, request.prompt_tokens, now_s)
            self._locations[request.request_id] = RequestLocation(
                request.instance_id, request.epoch, request.phase
            )
            # Placed by another scheduler: the ended phase follows from the one that it entered.
            first = request.phase is not Phase.ANSWERING or request.output_tokens <= 1
            left = Phase.PREFILL if first else Phase.REASONING
        else:
            # The source still reports a handed-over request for a moment, with the older epoch.
            if request.instance_id != location.instance_id:
                if request.epoch <= location.epoch:
                    return
                if (before := self._known.get(location.instance_id)) is not None:
                    before.unsettle(request.request_id)
            left = location.phase
            location.instance_id, location.epoch, location.phase = (
                request.instance_id,
                request.epoch,
                request.phase,
            )
        if left is not request.phase and request.phase is not Phase.PREFILL:
            changes.append(PhaseChange(request, left))

    def _request_left(self, request_id: str, instance_id: str) -> None:
        location = self._locations.get(request_id)
        if location is not None and location.instance_id == instance_id:
            del self._locations[request_id]

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._locations[request_id]

    def _set_migrating(self, request_id: str, migrating: bool) -> None:
        location = self._locations.get(request_id)
        if location is not None and (tracked := self._known.get(location.instance_id)) is not None:
            tracked.set_migrating(request_id, migrating)
            self._mark_dirty(location.instance_id)

    def _instance_state(self, name: str) -> InstanceState:
        if name in self._suspects or name in self._silent:
            return InstanceState.SUSPECT
        return InstanceState.DRAINING if name in self._draining else InstanceState.ACTIVE

    def _instance_view(self, name: str) -> InstanceView:
        tracked = self._known[name]
        _, measured = self._measured.get(tracked.record.profile_kind, (None, None))
        return tracked.view(self._instance_state(name), self._pool(name), measured)

    def _pool(self, name: str) -> Pool | None:
        order = self._pool_orders.get(name)
        return self._pools.get(name) if order is None else order.pool

    def _mark_dirty(self, name: str) -> None:
        self._dirty.add(name)
        self._view = None

    def _rebuild(self) -> None:
        self._views = {name: self._instance_view(name) for name in self._known}
        self._changes = ViewChanges()
        self._dirty.clear()
        self._view = None
