"""What is known of a cluster, as a view for policies with all that was decided since already in it.

One interface for two clocks: `ReportedCluster` is fed with the messages of live workers, the simulator's
model (simulator/views.py) with its own instances, which it counts only when a policy looks. Both correct an
instance's last report with the same code, so that a burst of decisions between two reports does not pile up
on one instance. They differ in how they name a request (by id; by the job itself) and in when they know that
a report has a placement in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tailrace.cluster import ClusterView, HotPrefixes, InstanceView, Stage
from tailrace.control.hot_prefixes import HotTracker
from tailrace.lengths import LengthStatistics, LengthWindow
from tailrace.model_identity import difference, is_model
from tailrace.records import InstanceRecord

C = TypeVar("C")


class ClusterModel(ABC, Generic[C]):
    """Views of instances, made anew only where something has changed. `now_s` is the model's own clock: the
    scheduler's monotonic one, or the simulated one."""

    # Prefixes that arrivals share, and copies of them.
    hot: HotTracker

    def __init__(self) -> None:
        # Instances by id, in id order.
        self._known: dict[str, C] = {}
        self._stages: tuple[Stage, ...] = ()
        self._views: dict[str, InstanceView] = {}
        self._dirty: set[str] = set()
        # None: no policy wants to know.
        self._lengths: LengthWindow | None = None

    # ---- what a policy sees

    @abstractmethod
    def view_at(self, now_s: float) -> ClusterView:
        """The whole cluster."""

    def view_for_arrival(self, model: str, now_s: float) -> ClusterView:
        """The cluster as a request for this model may see it; empty: any model."""
        return self.view_at(now_s)

    def view_for_request(self, instance_id: str, now_s: float) -> ClusterView:
        """The cluster as a request on this instance may see it."""
        return self.view_at(now_s)

    def lengths(self, now_s: float) -> LengthStatistics | None:
        """Lengths of recent requests, if they are kept; never change once given."""
        return self._lengths.statistics(now_s) if self._lengths is not None else None

    def hot_prefixes(self, now_s: float) -> HotPrefixes | None:
        """Prefixes that recent arrivals share, if they are kept; never change once given."""
        return self.hot.view(now_s)

    # ---- what happens

    def keep_lengths(self, period_s: float | None, now_s: float) -> None:
        """Keep the lengths of the requests of so many seconds from now on; None: of none."""
        if period_s != (self._lengths.period_s if self._lengths is not None else None):
            self._lengths = LengthWindow(period_s, now_s) if period_s is not None else None

    def note_arrived(self, prompt_tokens: int, now_s: float) -> None:
        """A request came to the cluster."""
        if self._lengths is not None:
            self._lengths.arrived(prompt_tokens, now_s)

    def note_finished(self, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request made its last token."""
        if self._lengths is not None:
            self._lengths.finished(prompt_tokens, output_tokens, now_s)

    # ---- for the models

    @abstractmethod
    def _instance_view(self, instance_id: str) -> InstanceView:
        """One instance now."""

    def _renew(self, instance_ids: Iterable[str]) -> None:
        for instance_id in instance_ids:
            self._views[instance_id] = self._instance_view(instance_id)


@dataclass(frozen=True, slots=True)
class Counted:
    """A request on an instance, as the counts have it: in the last report, or added since."""

    context_tokens: int
    kv_tokens: int
    # It runs or is paused; False: it waits for a seat.
    seated: bool


@dataclass(slots=True)
class Pending:
    """A request placed on an instance that no report shows yet."""

    # Context to be prefilled, and what of it was found in the prefix cache.
    tokens: int
    cached_tokens: int
    # When it was placed: whatever the model orders placements and reports by.
    placed: float


K = TypeVar("K")
P = TypeVar("P", bound=Pending)


class Corrections(Generic[K, P]):
    """What was decided and heard of one instance since its last report, and is not in that report: changes to
    its counts, zero when a report has just come. Tokens unless named otherwise.

    Live scheduler and simulator correct an instance's last report with this same code, so that a burst of
    decisions between two reports does not pile up on one instance. They differ in how they name a request (by
    id; by the job itself) and in when they know that a report has a placement in it.
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
        # Open migrations to here: the room that they will take, as far as no report counts it; and the
        # context that they bring.
        self.coming: dict[K, int] = {}
        self.coming_context: dict[K, int] = {}
        # Open migrations from here.
        self.leaving: set[K] = set()
        self.forget_changes()

    # ---- reports

    def forget_changes(self) -> None:
        """A new report has them. Placements and migrations stay until that report shows them."""
        self.running_change = 0
        self.waiting_change = 0
        self.context_change = 0
        self.kv_change = 0

    def counts(
        self, running: int, waiting: int, context_tokens: int, kv_tokens: int
    ) -> tuple[int, int, int, int]:
        """The same four counts of the last report, corrected; none is less than 0."""
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
        """The request was placed here. It must not be pending already."""
        self.pending[key] = pending
        self.pending_tokens += pending.tokens
        self.pending_cached_tokens += pending.cached_tokens

    def remove_pending(self, key: K) -> P | None:
        """The request has begun, or has gone, or a report shows it; None: it was not pending."""
        pending = self.pending.pop(key, None)
        if pending is not None:
            self.pending_tokens -= pending.tokens
            self.pending_cached_tokens -= pending.cached_tokens
        return pending

    # ---- requests on the instance

    def add_request(self, key: K, request: Counted) -> None:
        """The request is here, and the counts do not have it. KV that was set aside for its migration, and
        that a report shows, is not counted again."""
        self._count_seat(request, 1)
        self.context_change += request.context_tokens
        reserved = self.coming.get(key)
        if reserved != 0:
            self.kv_change += request.kv_tokens
        if reserved is not None:
            self.coming[key] = 0

    def change_request(self, before: Counted, after: Counted) -> None:
        """A request that the counts have is now so. Its KV stays as it was counted until the next report."""
        self._count_seat(before, -1)
        self._count_seat(after, 1)
        self.context_change += after.context_tokens - before.context_tokens

    def remove_request(self, request: Counted) -> None:
        """A request that the counts have has gone."""
        self._count_seat(request, -1)
        self.context_change -= request.context_tokens
        self.kv_change -= request.kv_tokens

    def _count_seat(self, request: Counted, by: int) -> None:
        if request.seated:
            self.running_change += by
        else:
            self.waiting_change += by

    # ---- migrations

    def open_arrival(self, key: K, kv_tokens: int, context_tokens: int) -> None:
        """A migration of the request to here was opened: it will need the room."""
        self.coming[key] = kv_tokens
        self.coming_context[key] = context_tokens

    def open_departure(self, key: K) -> None:
        """A migration of the request from here was opened."""
        self.leaving.add(key)

    def close_migration(self, key: K) -> None:
        """The migration of the request, to here or from here, is over."""
        self.coming.pop(key, None)
        self.coming_context.pop(key, None)
        self.leaving.discard(key)


_NOBODY: Final[frozenset[str]] = frozenset()
# Keys of models that were asked for; front ends of one cluster ask for few.
_ASKED_MAX: Final = 256


class ModelGroups:
    """Of one membership. Pure."""

    def __init__(self, instances: Mapping[str, InstanceRecord]) -> None:
        self._instances = instances
        self._asked: dict[str, frozenset[str]] = {}
        self._going_on: dict[str, frozenset[str]] = {}
        by_kv: dict[str, set[str]] = defaultdict(set)
        for name, record in instances.items():
            by_kv[record.model_fingerprint].add(name)
        self._by_kv = {fingerprint: frozenset(names) for fingerprint, names in by_kv.items()}

    def running(self, model: str) -> frozenset[str]:
        """Instances that run the model of this key (tailrace.model_identity)."""
        found = self._asked.get(model)
        if found is None:
            found = frozenset(n for n, r in self._instances.items() if is_model(r.model_identity, model))
            if len(self._asked) < _ASKED_MAX:
                self._asked[model] = found
        return found

    def going_on(self, instance_id: str) -> frozenset[str]:
        """Instances that can go on with this one's answers, by replay if not live; itself among them."""
        found = self._going_on.get(instance_id)
        if found is None:
            record = self._instances.get(instance_id)
            if record is None:
                return _NOBODY
            identity = record.model_identity
            alike = {n for n, r in self._instances.items() if not difference(identity, r.model_identity)}
            found = self._going_on[instance_id] = self.exchanging_kv(instance_id) | alike
        return found

    def exchanging_kv(self, instance_id: str) -> frozenset[str]:
        """Instances that can take KV from this one, itself among them."""
        record = self._instances.get(instance_id)
        return _NOBODY if record is None else self._by_kv[record.model_fingerprint]
