"""The model of a cluster: views for policies that already include every decision made since the last reports.

One interface for two clocks: `ReportedCluster` is fed with messages of live workers, the simulator's model
(simulator/views.py) with its own instances, which it counts only when a policy asks. Both correct an
instance's last report with the same code (`Corrections`), so that a burst of decisions between two reports
does not pile up on one instance. They differ in how they identify a request (by id; by the job itself) and in
when they know that a report includes a placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from tailrace.cluster import ClusterView, HotPrefixes, InstanceView, Stage, ViewChanges
from tailrace.control.hot_prefixes import HotTracker
from tailrace.lengths import LengthStatistics, LengthWindow
from tailrace.model_identity import covers, difference
from tailrace.records import InstanceRecord

C = TypeVar("C")


class ClusterModel(ABC, Generic[C]):
    """Build views of instances, again only where something changed.

    `now_s` is the model's own clock: the scheduler's monotonic one, or the simulated one.
    """

    # Tracks prefixes that arrivals share, and copies of them.
    hot: HotTracker

    def __init__(self) -> None:
        # Instances by id, in id order.
        self._known: dict[str, C] = {}
        self._stages: tuple[Stage, ...] = ()
        self._views: dict[str, InstanceView] = {}
        self._dirty: set[str] = set()
        # None: no policy uses them.
        self._lengths: LengthWindow | None = None

    # ---- what a policy sees

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages now, without making a view."""
        return self._stages

    @abstractmethod
    def view_at(self, now_s: float) -> ClusterView:
        """Return the view of the whole cluster."""

    def view_for_arrival(self, model: str, now_s: float) -> ClusterView:
        """Return the instances on which a request for this model may run; empty: any model."""
        return self.view_at(now_s)

    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView:
        """Return the instances to which a request on this instance may move."""
        return self.view_at(now_s)

    def is_out_of_date(self, now_s: float) -> bool:
        """Return whether nothing has been heard of any instance for so long that no wait can be predicted."""
        return False

    def lengths(self, now_s: float) -> LengthStatistics | None:
        """Return statistics of recent request lengths, immutable; None if they are not kept."""
        return self._lengths.statistics(now_s) if self._lengths is not None else None

    def hot_prefixes(self, now_s: float) -> HotPrefixes | None:
        """Return prefixes that recent arrivals share, immutable; None if they are not kept."""
        return self.hot.view(now_s)

    # ---- what happens

    def keep_lengths(self, period_s: float | None, now_s: float) -> None:
        """Keep the request lengths of the last `period_s` seconds from now on; None: keep none."""
        if period_s != (self._lengths.period_s if self._lengths is not None else None):
            self._lengths = LengthWindow(period_s, now_s) if period_s is not None else None

    def count_arrival(self, prompt_tokens: int, now_s: float) -> None:
        """Count a request that arrived at the cluster."""
        if self._lengths is not None:
            self._lengths.arrived(prompt_tokens, now_s)

    def count_finish(self, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Count a request that made its last token."""
        if self._lengths is not None:
            self._lengths.finished(prompt_tokens, output_tokens, now_s)

    # ---- for subclasses

    @abstractmethod
    def _instance_view(self, instance_id: str) -> InstanceView:
        """Return the current view of one instance."""

    def _renew(self, instance_ids: Iterable[str]) -> None:
        for instance_id in instance_ids:
            self._views[instance_id] = self._instance_view(instance_id)


@dataclass(frozen=True, slots=True)
class CountedRequest:
    """A request on an instance as included in the counts: of the last report, or added since."""

    context_tokens: int
    kv_tokens: int
    # Running or paused; False: waiting for a slot in the batch.
    has_slot: bool


@dataclass(slots=True)
class Pending:
    """A request placed on an instance that no report shows yet."""

    # Context to be prefilled, and the part of it found in the prefix cache.
    tokens: int
    cached_tokens: int
    # When it was placed, in whatever the model orders placements and reports by.
    placed: float


K = TypeVar("K")
P = TypeVar("P", bound=Pending)


class Corrections(Generic[K, P]):
    """Correct one instance's last report by what was decided and received since: changes to its counts, in
    tokens unless named otherwise, all zero right after a report.

    The live scheduler and the simulator share this code; see the module.
    """

    __slots__ = (
        "coming",
        "coming_context",
        "context_change",
        "kv_change",
        "leaving",
        "pending",
        "pending_cached_tokens",
        "pending_tokens",
        "running_change",
        "waiting_change",
    )

    def __init__(self) -> None:
        self.pending: dict[K, P] = {}
        self.pending_tokens = 0
        self.pending_cached_tokens = 0
        # Open migrations to this instance: the KV that they will take beyond what a report counts, and their
        # context.
        self.coming: dict[K, int] = {}
        self.coming_context: dict[K, int] = {}
        # Open migrations from this instance.
        self.leaving: set[K] = set()
        self.reset_changes()

    # ---- reports

    def reset_changes(self) -> None:
        """Reset the changes, which a new report includes. Placements and migrations stay until that report
        shows them."""
        self.running_change = 0
        self.waiting_change = 0
        self.context_change = 0
        self.kv_change = 0

    def counts(
        self, running: int, waiting: int, context_tokens: int, kv_tokens: int
    ) -> tuple[int, int, int, int]:
        """Return the last report's four counts, corrected; none is below 0."""
        running += self.running_change
        waiting += self.waiting_change
        context_tokens += self.context_change + self.pending_tokens
        kv_tokens += self.kv_change
        if self.coming:
            kv_tokens += sum(self.coming.values())
        return (
            running if running > 0 else 0,
            (waiting if waiting > 0 else 0) + len(self.pending),
            context_tokens if context_tokens > 0 else 0,
            kv_tokens if kv_tokens > 0 else 0,
        )

    # ---- placements

    def add_pending(self, key: K, pending: P) -> None:
        """Add a request that was placed here. It must not be pending already."""
        self.pending[key] = pending
        self.pending_tokens += pending.tokens
        self.pending_cached_tokens += pending.cached_tokens

    def remove_pending(self, key: K) -> P | None:
        """Remove a request that has begun, has gone, or is in a report; return None if it was not pending."""
        pending = self.pending.pop(key, None)
        if pending is not None:
            self.pending_tokens -= pending.tokens
            self.pending_cached_tokens -= pending.cached_tokens
        return pending

    # ---- requests on the instance

    def add_request(self, key: K, request: CountedRequest) -> None:
        """Add a request that is here but not in the counts.

        KV that was reserved for its migration and is in a report is not counted again.
        """
        self._count_slot(request, 1)
        self.context_change += request.context_tokens
        reserved = self.coming.get(key)
        if reserved != 0:
            self.kv_change += request.kv_tokens
        if reserved is not None:
            self.coming[key] = 0

    def change_request(self, before: CountedRequest, after: CountedRequest) -> None:
        """Update a request that is in the counts. Its KV stays as counted until the next report."""
        self._count_slot(before, -1)
        self._count_slot(after, 1)
        self.context_change += after.context_tokens - before.context_tokens

    def remove_request(self, request: CountedRequest) -> None:
        """Remove a request that is in the counts."""
        self._count_slot(request, -1)
        self.context_change -= request.context_tokens
        self.kv_change -= request.kv_tokens

    def _count_slot(self, request: CountedRequest, by: int) -> None:
        if request.has_slot:
            self.running_change += by
        else:
            self.waiting_change += by

    # ---- migrations

    def open_arrival(self, key: K, kv_tokens: int, context_tokens: int) -> None:
        """Reserve KV for a migration to this instance that was opened."""
        self.coming[key] = kv_tokens
        self.coming_context[key] = context_tokens

    def open_departure(self, key: K) -> None:
        """Record a migration from this instance that was opened."""
        self.leaving.add(key)

    def close_migration(self, key: K) -> None:
        """Remove a migration to or from this instance that is over."""
        self.coming.pop(key, None)
        self.coming_context.pop(key, None)
        self.leaving.discard(key)


_NO_INSTANCES: Final[frozenset[str]] = frozenset()
# Models whose instances are cached; front ends of one cluster request few.
_CACHED_MODELS_MAX: Final = 256


class ModelGroups:
    """Group the instances of one membership by what they can exchange. Pure."""

    def __init__(self, instances: Mapping[str, InstanceRecord]) -> None:
        self._instances = instances
        self._by_model: dict[str, frozenset[str]] = {}
        self._by_continuation: dict[str, frozenset[str]] = {}
        by_kv: dict[str, set[str]] = defaultdict(set)
        for name, record in instances.items():
            by_kv[record.model_fingerprint].add(name)
        self._by_kv = {fingerprint: frozenset(names) for fingerprint, names in by_kv.items()}

    def running(self, model: str) -> frozenset[str]:
        """Return the instances that run the model of this key (tailrace.model_identity)."""
        members = self._by_model.get(model)
        if members is None:
            members = frozenset(n for n, r in self._instances.items() if covers(model, r.model_identity.key))
            if len(self._by_model) < _CACHED_MODELS_MAX:
                self._by_model[model] = members
        return members

    def able_to_continue(self, instance_id: str) -> frozenset[str]:
        """Return the instances that can continue this one's answers, live or by replay; itself among them."""
        members = self._by_continuation.get(instance_id)
        if members is None:
            record = self._instances.get(instance_id)
            if record is None:
                return _NO_INSTANCES
            identity = record.model_identity
            alike = {n for n, r in self._instances.items() if not difference(identity, r.model_identity)}
            members = self._by_continuation[instance_id] = self.exchanging_kv(instance_id) | alike
        return members

    def exchanging_kv(self, instance_id: str) -> frozenset[str]:
        """Return the instances that can take KV from this one; itself among them."""
        record = self._instances.get(instance_id)
        return _NO_INSTANCES if record is None else self._by_kv[record.model_fingerprint]


class PartialViews:
    """Views of some instances of a cluster, made again only where the view of all has changed."""

    def __init__(self) -> None:
        # By the instances' names: the view of them, and that of all from which it was made.
        self._made: dict[frozenset[str], tuple[ClusterView, ClusterView]] = {}

    def of(self, whole: ClusterView, names: frozenset[str]) -> ClusterView:
        """Return the view of the instances with these names."""
        if len(names) == len(whole.instances):
            return whole
        part, of = self._made.get(names, (None, whole))
        if part is None or of is not whole:
            part = _part_of(whole, names, part, of)
            self._made[names] = part, whole
        return part

    def clear(self) -> None:
        """Forget all: the cluster has other instances."""
        self._made.clear()


def _part_of(
    whole: ClusterView, names: frozenset[str], before: ClusterView | None, of: ClusterView
) -> ClusterView:
    """Return a view of the instances with these names. `before`: the previous one, made from `of`."""
    changes, changed = ViewChanges(), None
    if before is not None and of.changes is whole.changes is not None:
        changed = whole.changes.between(of.version, whole.version)
    if before is not None and before.changes is not None and changed is not None:
        changes = before.changes
        instances = dict(before.instances)
        instances.update((name, whole.instances[name]) for name in changed & names)
        changes.add(changed & names)
    else:
        instances = {name: instance for name, instance in whole.instances.items() if name in names}
    stages = tuple(
        replace(stage, instance_ids=tuple(n for n in stage.instance_ids if n in names))
        for stage in whole.stages
    )
    return ClusterView(MappingProxyType(instances), stages, changes=changes, version=changes.version)
