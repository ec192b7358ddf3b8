"""What is known of a cluster, as a view for policies with all that was decided since already in it.

One interface for two clocks: `ReportedCluster` is fed with the messages of live workers, the simulator's
model (simulator/views.py) with its own instances, which it counts only when a policy looks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from tailrace.cluster import ClusterView, InstanceView, Stage
from tailrace.lengths import LengthStatistics, LengthWindow

C = TypeVar("C")


class ClusterModel(ABC, Generic[C]):
    """Views of instances, made anew only where something has changed. `now_s` is the model's own clock: the
    scheduler's monotonic one, or the simulated one."""

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
