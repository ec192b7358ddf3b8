"""Arrival: which instance gets a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler_svc.active_policy import ActivePolicy
from scheduler_svc.decider import Hands
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.state import ClusterState
from tailrace.actions import Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceState
from tailrace.policy.least_loaded import LeastLoaded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """`instance_id` is empty exactly when `refusal` is not. `seconds` is what deciding took."""

    instance_id: str
    policy: str
    refusal: str
    seconds: float
    # Of the request, that the instance is known to hold.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request begins with: names of its blocks, of so many tokens each, and its session, if known."""

    names: Sequence[int] = ()
    block_tokens: int = 0
    session_id: str = ""


_NO_PREFIX: Final = Prefix()


class Placer:
    """Asks the policy. One that fails, or names an instance that may not be used, is stood in for."""

    def __init__(
        self, state: ClusterState, active: ActivePolicy, hands: Hands, metrics: SchedulerMetrics
    ) -> None:
        self._state = state
        self._active = active
        self._hands = hands
        self._metrics = metrics
        self._stand_in = LeastLoaded()
        self._seconds = metrics.decision_seconds.labels("place")
        self._seq = 0

    def place(
        self,
        request_id: str,
        frontend_id: str,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
        excluded: frozenset[str],
        model: str = "",
        prefix: Prefix = _NO_PREFIX,
    ) -> Decision:
        """Decide for an instance of this model (its key; empty: any) and count the placement in. Waits for no
        I/O: works on the last known state.

        What the policy decided beside it, such as a pool move, is carried out after, by whichever scheduler
        placed: pool moves are compare-and-swap, so that it need not lead.
        """
        began_s = time.perf_counter()
        arrival = Arrival(
            request_id,
            prompt_tokens,
            max_tokens,
            self._seq,
            output_tokens,
            excluded,
            self._state.cache.of_arrival(
                prefix.names, prefix.block_tokens, prompt_tokens + output_tokens, time.monotonic()
            ),
            prefix.names,
            prefix.session_id,
        )
        self._seq += 1
        policy = self._active.name
        placement = self._ask(arrival, self._state.view_of_model(model))
        now_s = time.perf_counter()
        self._seconds.observe(now_s - began_s)
        if isinstance(placement, Refuse):
            self._metrics.refusals.inc()
            return Decision("", policy, placement.reason or "refused", now_s - began_s)
        self._state.place(arrival, placement.instance_id, frontend_id, time.monotonic())
        self._metrics.placements.labels(policy, placement.instance_id).inc()
        if placement.also:
            self._hands.submit(placement.also, policy)
        cached = arrival.cached_tokens(placement.instance_id)
        self._metrics.placed_tokens.inc(arrival.context_tokens)
        self._metrics.placed_cached_tokens.inc(cached)
        return Decision(placement.instance_id, policy, "", now_s - began_s, cached)

    def _ask(self, arrival: Arrival, view: ClusterView) -> Placement:
        now_s = time.time()
        try:
            placement = self._active.policy.place(view, arrival, now_s)
        except Exception:
            log.exception("policy %s failed to place; least_loaded stands in", self._active.name)
            self._metrics.policy_errors.labels(self._active.name, "place").inc()
            return self._stand_in.place(view, arrival, now_s)
        if isinstance(placement, Place) and not _allowed(view, arrival, placement.instance_id):
            log.error("policy %s placed on %s, which it must not", self._active.name, placement.instance_id)
            self._metrics.policy_errors.labels(self._active.name, "place").inc()
            return self._stand_in.place(view, arrival, now_s)
        return placement


def _allowed(view: ClusterView, arrival: Arrival, instance_id: str) -> bool:
    instance = view.instances.get(instance_id)
    return (
        instance is not None
        and instance.state is InstanceState.ACTIVE
        and instance_id not in arrival.excluded
    )
