"""The interface of a policy: five decision points in the life of a request.

A policy is pure: it gets an immutable view and the time, and returns actions. It does no I/O, reads no clock,
and keeps no state between calls; whatever it needs to remember is in the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tailrace.actions import Action, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.intra.base import ENGINE_ORDER
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parametrized


class Policy(Parametrized, ABC):
    """A policy of the fleet, and what it declares about the system around it.

    Only `place` is required; every other decision point does nothing by default. Attributes that are declared
    by `parameter` may be set by users with `tailrace set policy NAME key=value` and `--set key=value`. A
    constructor gets them as keyword arguments, and one for each of `needs` that is known, which must have a
    default.
    """

    # Facts about the deployment that it uses for planning.
    needs: ClassVar[tuple[Fact, ...]] = ()
    # The batch order inside each instance that belongs to it, a name of `tailrace.intra.registry`. A paper's
    # baselines use the order of the system that they are compared with, so that only the dispatch differs.
    batch_order: ClassVar[str] = ENGINE_ORDER
    # What happens to its migrations whose target has no room.
    when_full: ClassVar[WhenFull] = WhenFull.WAIT
    # Whether its requests are moved once they are placed; users set it of any policy that moves requests, and
    # who asks a policy leaves its moves out.
    moves: bool = True
    # Share of the instances in the prefill pool at the start; the others are in the decode pool. None: no
    # pools.
    prefill_share: float | None = None
    # Whether front ends show answers at the users' reading pace while it places.
    pacer: bool = False
    # Whether it uses predicted remaining lengths.
    predictions: bool = False
    # One line for `tailrace get policies`.
    summary: str = ""
    # Seconds between calls of on_tick; None: never called.
    tick_interval_s: float | None = None
    # Period of the request lengths in on_tick's view (`ClusterView.lengths`), in seconds; None: not kept.
    lengths_period_s: float | None = None
    # Period of the shared prefixes in on_tick's view (`ClusterView.hot`), in seconds; None: not kept.
    prefixes_period_s: float | None = None

    @abstractmethod
    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Decide where to prefill an arriving request."""

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Decide where to decode a request whose prefill is done."""
        return ()

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Decide where to answer a request whose reasoning has ended."""
        return ()

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Handle a request that has outgrown its instance's stage; called only if stages are set."""
        return ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Decide periodically; called every tick_interval_s."""
        return ()
