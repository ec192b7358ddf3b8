"""The five decision points at which a request meets a policy.

A policy is pure: it gets an immutable view and the time, and returns actions. It does no I/O, reads no
clock, and keeps no state between calls; whatever it needs to remember is in the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tailrace.actions import Action, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.intra.base import ENGINE_ORDER
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter, Value


class Policy(ABC):
    """A policy of the fleet, and what it declares of the system around it.

    Only `place` must be given; every other decision point does nothing by default. The constructor gets a
    keyword argument for each of `parameters`, and one for each of `needs` that is known; all of them have
    defaults, so that a policy can be made without any.
    """

    # What users may set with `tailrace set policy NAME key=value` and `--set key=value`.
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    # Facts of the deployment that it plans with.
    needs: ClassVar[tuple[Fact, ...]] = ()
    # The order inside each instance that goes with it, a name of `tailrace.intra.registry`. A paper's
    # baselines have the order of the system that they are compared with, so that the dispatch alone differs.
    batch_order: ClassVar[str] = ENGINE_ORDER
    # What becomes of its migrations whose target has no room.
    when_full: ClassVar[WhenFull] = WhenFull.WAIT
    # The policy whose paper compares itself with this one, where that is all that this one is for.
    baseline_of: ClassVar[str] = ""
    # Share of the instances in the prefill pool at the start, the others in the decode pool; None: no pools.
    prefill_share: float | None = None
    # It decides by predicted remaining lengths, where workers predict.
    predictions: bool = False
    # One line for `tailrace get policies`.
    summary: str = ""
    # Seconds between calls of on_tick; None: never called.
    tick_interval_s: float | None = None
    # Of how many seconds on_tick's view has the lengths of requests (`ClusterView.lengths`); None: of none.
    lengths_period_s: float | None = None
    # Of how many seconds on_tick's view has the prefixes that arrivals share (`ClusterView.hot`); None: none.
    prefixes_period_s: float | None = None

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


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with some parameters set, under a name of its own: an ablation in a policy's paper, say.

    An entry point of `tailrace.policies` may name a Variant in place of a class. Its name is accepted
    wherever a policy's is; parameters that a user sets besides win.
    """

    policy: type[Policy]
    parameters: Mapping[str, Value]

    def make(self, **arguments: object) -> Policy:
        """Return the policy; `arguments` are further ones of its constructor. Raises what that raises."""
        return self.policy(**{**self.parameters, **arguments})
