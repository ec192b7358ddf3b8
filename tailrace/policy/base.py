"""The five decision points at which a request meets a policy.

A policy is pure: it gets an immutable view and the time, and returns actions. It does no I/O, reads no
clock, and keeps no state between calls; whatever it needs to remember is in the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tailrace.actions import Action, Placement
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter
from tailrace.policy.when_full import WhenFull


class Policy(ABC):
    """Only `place` must be given; every other decision point does nothing by default.

    The constructor gets a keyword argument for each of `parameters`, and one for each of `needs` that is
    known; all of them have defaults, so that a policy can be made without any.
    """

    # What users may set with `tailrace set policy NAME key=value` and `--set key=value`.
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    # Facts of the deployment that it plans with.
    needs: ClassVar[tuple[Fact, ...]] = ()
    # What becomes of its migrations whose target has no room.
    when_full: ClassVar[WhenFull] = WhenFull.WAIT
    # One line for `tailrace get policies`.
    summary: str = ""
    # Seconds between calls of on_tick; None: never called.
    tick_interval_s: float | None = None
    # Of how many seconds on_tick's view has the lengths of requests (`ClusterView.lengths`); None: of none.
    lengths_period_s: float | None = None

    @abstractmethod
    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Arrival: where to prefill."""

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Prefill is done: where to decode."""
        return ()

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Reasoning ended: where to answer."""
        return ()

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """The request outgrew the stage of its instance (only called when stages are set)."""
        return ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Called every tick_interval_s."""
        return ()
