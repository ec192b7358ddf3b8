"""ARES's policy: dispatch by load, and decode rescheduling by current and predicted load (sections 5, 6.1).

The parameter `rescheduling` has the paper's baselines: "off" is its "vLLM" (dispatch only), "current_load"
its "vLLM + rescheduling" (Algorithm 1 on current loads only). Predictions, with their errors, are input from
the view: `RequestView.predicted_remaining_tokens` and `InstanceView.future_load`.

All systems that the paper compares dispatch by "prefill-decode real-time KV cache load balancing (serving as
the common foundation)" (section 6.1), and so do all policies here. Section 3 dispatches a request "to a
decode instance according to its input length, predicted output length, and the current load of each" without
saying how: with `dispatch=variance` the policy minimizes the time-weighted variance (equation 4) over the
instances that satisfy line 21.

Pools are used if the cluster has them. An instance in no pool does both kinds of work; a D->P instance gets
no more decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tailrace.actions import Action, Migrate, Place, Placement
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
)
from tailrace.perf.horizon import HORIZON, NOW, Horizon, floats
from tailrace.perf.remaining import expected_remaining, tokens_left
from tailrace.perf.steps import StepModel
from tailrace.policy.ares.rescheduling import Constants, Rescheduling, collect
from tailrace.policy.base import Policy
from tailrace.policy.candidates import CACHE_AWARE, NO_INSTANCE, candidates, credit, fits_device, with_request
from tailrace.policy.columns import Columns, PerInstances, has_many, smallest
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.policy.requests import Mask
from tailrace.profiles import Profile

_NO_DECODE = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
_NO_PREFILL = (Pool.DECODE, Pool.PREFILL_TO_DECODE)


def decoders(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances that decode: the paper's set I."""
    return [i for i in instances if i.pool is None or i.pool not in _NO_DECODE]


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances that prefill if some of them do nothing else; else none, and requests decode where
    they are prefilled."""
    able = [i for i in instances if i.pool is None or i.pool not in _NO_PREFILL] or list(instances)
    pools = [i.pool for i in able if i.pool is not None]
    return able if any(pool in _NO_DECODE for pool in pools) else []


def least_backlog(instances: Sequence[InstanceView], held: Callable[[InstanceView], int]) -> InstanceView:
    """Return the prefill instance with the least backlog, then the fewest requests (the paper names no rule).

    `held`: function from an instance to the arrival's cached tokens there.
    """
    return min(instances, key=lambda i: (i.prefill_backlog_tokens - held(i), i.load))


def kv_load(instance: InstanceView) -> int:
    """Return the KV load in tokens, used and queued."""
    return instance.kv_used_tokens + instance.prefill_backlog_tokens


class LeastKvLoad:
    """Select the decode instance with the least KV load that has room for a request, by column."""

    def __init__(self) -> None:
        self._columns = PerInstances(lambda: Columns(_read, 4))

    def for_request(self, view: ClusterView, request: RequestView) -> InstanceView | None:
        """Return the instance, the first by id of equals; None: none but the request's own has room."""
        columns = self._columns.of(view)
        load, free, longest, block = columns.update(view)
        tokens = request.context_tokens
        # As `candidates.fits_device`.
        fits: Mask = (np.ceil(tokens / block) + 1.0) * block <= free
        fits &= tokens < longest
        source = columns.seen.at.get(request.instance_id)
        if source is not None:
            fits[source] = False
        return view.instances[columns.seen.names[smallest(load, fits)]] if fits.any() else None


def _read(instance: InstanceView) -> tuple[float, ...]:
    able = instance.state is InstanceState.ACTIVE and instance.pool not in _NO_DECODE
    return (
        kv_load(instance),
        instance.kv_free_tokens if able else -1,
        instance.max_model_len if instance.max_model_len > 0 else math.inf,
        max(1, instance.block_tokens),
    )


def must_hand_over(source: InstanceView, request: RequestView) -> bool:
    """Return whether the request must leave its instance to decode."""
    return source.pool in _NO_DECODE and not request.migrating


def waiting_to_leave(view: ClusterView) -> Iterator[tuple[InstanceView, RequestView]]:
    """Yield requests that decode on prefill instances because no decode instance had room for them."""
    for source in view.placeable():
        if source.pool is not Pool.PREFILL:
            continue
        for request in source.requests:
            if request.phase is not Phase.PREFILL and request.state is RequestState.RUNNING:
                yield source, request


# Values of the parameter `dispatch`.
KV_LOAD: Final = "kv_load"
VARIANCE: Final = "variance"
# Values of the parameter `rescheduling`.
PREDICTED_LOAD: Final = "predicted_load"
CURRENT_LOAD: Final = "current_load"
OFF: Final = "off"


class Ares(Constants, Policy):
    """Dispatch by KV load; reschedule decodes by Algorithm 1 on each tick."""

    needs = (Fact.PROFILE,)
    rescheduling: str = parameter(
        PREDICTED_LOAD,
        "reschedule decodes by current and predicted load, by current load alone, or not at all",
        source="ARES, section 5; the others are baselines of its section 6.1",
        choices=(PREDICTED_LOAD, CURRENT_LOAD, OFF),
    )
    dispatch: str = parameter(
        KV_LOAD,
        "handover from prefill to decode: to the least KV load, or to the instance that minimizes equation 4",
        source="ARES, section 6.1 (all its systems dispatch by KV load)",
        choices=(KV_LOAD, VARIANCE),
    )
    cache_aware: bool = CACHE_AWARE
    pulls: bool = PULLS
    migrations_per_tick: int = parameter(
        1, "maximum number of migrations per interval", source="ARES, Algorithm 1, line 10", minimum=1
    )
    horizon_tokens: int = parameter(
        HORIZON.length,
        "number of decode steps to look ahead (H)",
        unit="tokens",
        source="ARES, section 5.3 (the paper's one length scale)",
        minimum=1,
    )
    horizon_points: int = parameter(
        HORIZON.points,
        "number of equidistant steps of the horizon at which loads are compared; 0: only the present",
        minimum=0,
        maximum=4096,
    )
    horizon_end_weight: float = parameter(
        HORIZON.end_weight,
        "weight of the horizon's last step relative to the present (beta_H / beta_0)",
        source="ours, of ARES's equation 4",
        minimum=1e-9,
        maximum=1.0,
    )
    # 1P+3D (section 6.1).
    prefill_share = 0.25
    # "After a fixed interval (e.g., every 1 second)" (Algorithm 1, line 3).
    tick_interval_s = 1.0
    summary = "ARES: rescheduling of decodes by current and predicted token load"

    def __init__(self, *, profile: Profile | None = None, **parameters: Value) -> None:
        """Raise ValueError if the horizon has more points than tokens.

        Workers report loads for the default horizon; for others, loads are simulated here.
        """
        super().__init__(**parameters)
        constants = {constant.name: getattr(self, constant.name) for constant in Constants.parameters}
        self.algorithm = Rescheduling(**constants)
        self.predictions = self.rescheduling == PREDICTED_LOAD
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, self.pulls)
        self.least_kv_load = LeastKvLoad()
        horizon = Horizon(self.horizon_tokens, self.horizon_points, self.horizon_end_weight)
        self.horizon = horizon if self.predictions else NOW

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place on the prefill instance with the least backlog; if no instance only prefills, by decode
        load."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        prefilling = prefillers(instances)
        held = credit(arrival, self.cache_aware, self.nominal)
        if prefilling:
            return self.pull(view, arrival, Place(least_backlog(prefilling, held).instance_id))
        tokens = arrival.prompt_tokens + arrival.output_tokens
        remaining = tokens_left(arrival.prompt_tokens, arrival.output_tokens, arrival.max_tokens)
        if self.cache_aware and arrival.cached:
            instances = [replace(i, kv_used_tokens=i.kv_used_tokens - held(i)) for i in instances]
        return self.pull(view, arrival, Place(self.choose(instances, tokens, remaining).instance_id))

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over to a decode instance if this one only prefills; if none has room, a tick tries again."""
        source = view.instances.get(request.instance_id)
        if source is None or not must_hand_over(source, request):
            return ()
        if self.dispatch == KV_LOAD and has_many(view):
            target = self.least_kv_load.for_request(view, request)
            return () if target is None else (_handover(request, target),)
        action = self.hand_over(decoders(view.placeable()), source, request)
        return () if action is None else (action,)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Retry handovers that found no room, then reschedule by Algorithm 1."""
        instances = decoders(view.placeable())
        actions = self.retry_handovers(view, instances)
        if self.rescheduling == OFF:
            return actions
        loads = collect(instances, self.horizon)
        for _ in range(self.migrations_per_tick):
            move = self.algorithm.plan(loads, turn=int(now / self.tick_interval_s))
            if move is None:
                break
            source, target = instances[move.source].instance_id, instances[move.target].instance_id
            actions.append(Migrate(move.request.request_id, source, target, "rescheduling"))
            loads = self.algorithm.after(loads, move)
        return actions

    def choose(self, instances: Sequence[InstanceView], tokens: int, remaining: float) -> InstanceView:
        """Return the decode instance for a request with `tokens` of context and `remaining` expected output.

        It is the one with the least KV load, or the least equation 4 with the request added; the first of
        equals. For load x added to one of n instances, equation 4 differs between targets only by 2/n sum_k
        weights[k] x_k N_i,k. Without a horizon that is the least current load. `instances` must not be empty.
        """
        if self.dispatch == KV_LOAD:
            return min(instances, key=kv_load)
        added = self.horizon.contributions(floats([tokens]), floats([remaining]))[0]
        loads = collect(instances, self.horizon).tokens
        return instances[int((loads @ (self.horizon.weights * added)).argmin())]

    def is_memory_safe(self, target: InstanceView, request: RequestView) -> bool:
        """Return whether the target is expected to have memory for the request until it ends.

        With dispatch by equation 4 that is Algorithm 1, line 21; else, and without a horizon, always true.
        """
        if self.dispatch == KV_LOAD or not self.horizon.points:
            return True
        predicted = request.predicted_remaining_tokens or 0.0
        limit = self.memory_share * target.kv_capacity_tokens
        return target.context_tokens + request.context_tokens + predicted <= limit

    def hand_over(
        self, instances: Sequence[InstanceView], source: InstanceView, request: RequestView
    ) -> Migrate | None:
        """Return a handover to a decode instance with room; None if no instance has room."""
        tokens, here = request.context_tokens, source.instance_id
        with_room = [i for i in instances if fits_device(i, tokens) and i.instance_id != here]
        if not with_room:
            return None
        safe = [i for i in with_room if self.is_memory_safe(i, request)]
        target = self.choose(safe or with_room, tokens, expected_remaining(request))
        return _handover(request, target)

    def retry_handovers(self, view: ClusterView, instances: list[InstanceView]) -> list[Migrate]:
        """Hand over requests that decode on prefill instances; update `instances` with them."""
        actions: list[Migrate] = []
        for source, request in waiting_to_leave(view):
            if not must_hand_over(source, request):
                continue
            action = self.hand_over(instances, source, request)
            if action is None:
                continue
            actions.append(action)
            at = next(n for n, i in enumerate(instances) if i.instance_id == action.target_id)
            instances[at] = with_request(instances[at], request)
        return actions


def _handover(request: RequestView, target: InstanceView) -> Migrate:
    return Migrate(request.request_id, request.instance_id, target.instance_id, "prefill done")
