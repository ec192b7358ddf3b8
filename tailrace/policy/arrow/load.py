"""Arrow's load metrics (section 5.3, "Instance Load Evaluation")."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Pool, RequestView
from tailrace.perf.steps import Floats, max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.columns import Columns, PerInstances, smallest
from tailrace.policy.requests import Mask, table_of


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Compute an instance's loads from its view and its profile.

    `ttft`, `max_running_tokens`: for instances that have not been measured and report none.
    `tpot_slo_s`, `context_tokens`: for the Max Running Tokens of one that has been measured and reports none
    (`perf.steps.max_running_tokens`); None: as if it had not been measured.
    """

    ttft: TtftPredictor
    max_running_tokens: int
    tpot_slo_s: float | None = None
    context_tokens: int = 0

    def prefill_s(self, instance: InstanceView, tokens: int) -> float:
        """Return the seconds to prefill a prompt of this length there."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).prefill_s(tokens)

    def saved_s(self, instance: InstanceView, cached_tokens: int) -> float:
        """Return the prefill seconds saved there if the first `cached_tokens` of a prompt are cached."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).saved_s(cached_tokens)

    def prefill_delay_s(self, instance: InstanceView) -> float:
        """Return the seconds until a prompt that arrives now would start: as reported, else from the
        backlog."""
        if instance.prefill_delay_s is not None:
            return instance.prefill_delay_s
        measured = instance.measured
        # Counts the waiting prompts; a partly prefilled one is not waiting, and is counted by its tokens.
        return (self.ttft if measured is None else measured.ttft).backlog_s(
            instance.prefill_backlog_tokens, instance.waiting
        )

    def max_tokens(self, instance: InstanceView) -> int:
        """Return Max Running Tokens of Alg. 2: as reported, else as profiled; at most the KV capacity."""
        limit, measured = instance.max_running_tokens, instance.measured
        if limit is None:
            if self.tpot_slo_s is None or measured is None:
                limit = self.max_running_tokens
            else:
                limit = max_running_tokens(measured.profile, self.tpot_slo_s, self.context_tokens)
        return min(limit, instance.kv_capacity_tokens)


def running_tokens(instance: InstanceView) -> int:
    """Return the decode load: the context tokens of all requests on the instance and migrating to it."""
    return instance.context_tokens + instance.coming_tokens


def has_prefills_left(instance: InstanceView) -> bool:
    """Return whether the instance has unfinished prefill work."""
    return instance.prefill_backlog_tokens > 0


def has_decodes_left(instance: InstanceView) -> bool:
    """Return whether the instance has requests past prefill that are not already leaving.

    Read the requests only if the counts do not decide it.
    """
    if instance.running == 0 and instance.waiting == 0:
        return False
    return table_of(instance.requests).any_decoding()


def mean_token_interval_s(instances: Sequence[InstanceView]) -> float:
    """Return the mean recent token interval of the instances that run requests (section 5.5, case 2); 0 if
    none does."""
    intervals = [i.token_interval_s for i in instances if i.running > 0]
    return sum(intervals) / len(intervals) if intervals else 0.0


# Select the instances that Algorithms 1 and 2 name, by column.
#
# Only by what an instance reports: neither by the wait for KV nor by the prefix cache, which depend on the
# request or on the other instances.

# Groups by the order in which they are preferred; all others have none.
_NONE: Final = -1.0
_PREFILL_GROUPS: Final = (Pool.PREFILL, None, Pool.DECODE_TO_PREFILL)
_DECODE_GROUPS: Final = (Pool.DECODE, Pool.PREFILL_TO_DECODE)
# A delay in seconds, and the instance.
LeastDelay = tuple[float, InstanceView | None]


class PrefillTargets:
    """Select by the prefill delay."""

    def __init__(self, loads: LoadModel) -> None:
        self._loads = loads
        self._columns = PerInstances(lambda: Columns(self._read, 3))

    def least_delays(self, view: ClusterView, excluded: Collection[str]) -> tuple[LeastDelay, LeastDelay]:
        """Return t_1 and t_2 of Algorithm 1: those with the least delay of the prefill pool, in which
        instances without a pool count, and of the D->P pool.

        Of equal delays the fewest requests decide, then the pool, then the id.
        """
        columns = self._columns.of(view)
        values = columns.update(view)
        groups, seen = values[0], columns.seen
        if excluded:
            groups = groups.copy()
            groups[[seen.at[name] for name in excluded if name in seen.at]] = _NONE
        prefill = np.flatnonzero((groups == 0.0) | (groups == 1.0))
        flipping = np.flatnonzero(groups == 2.0)

        def least(among: NDArray[np.intp]) -> LeastDelay:
            delay_s, first = _least(values, among)
            return delay_s, None if first is None else view.instances[seen.names[first]]

        return least(prefill), least(flipping)

    def _read(self, instance: InstanceView) -> tuple[float, float, float]:
        return _group(instance, _PREFILL_GROUPS), self._loads.prefill_delay_s(instance), instance.load


class DecodeTargets:
    """Select by the running tokens."""

    def __init__(self, needs_room: bool) -> None:
        """`needs_room`: whether a target must have free KV for the request now, not only when it is empty."""
        self._needs_room = needs_room
        self._columns = PerInstances(lambda: Columns(self._read, 5))

    def least_tokens(
        self, view: ClusterView, request: RequestView
    ) -> tuple[InstanceView | None, InstanceView | None]:
        """Return t_1 and t_2 of Algorithm 2: those with the least running tokens of the decode and of the
        P->D pool that may get the request; of equals the first by id."""
        columns = self._columns.of(view)
        groups, tokens, room, longest, block = columns.update(view)
        context = request.context_tokens
        # As `candidates.kv_needed_tokens`.
        eligible: Mask = (np.ceil(max(request.kv_tokens, context) / block) + 1.0) * block <= room
        eligible &= context < longest
        source = columns.seen.at.get(request.instance_id)
        if source is not None:
            eligible[source] = False

        def first(group: int) -> InstanceView | None:
            among: Mask = eligible & (groups == group)
            return view.instances[columns.seen.names[smallest(tokens, among)]] if among.any() else None

        return first(0), first(1)

    def _read(self, instance: InstanceView) -> tuple[float, ...]:
        return (
            _group(instance, _DECODE_GROUPS),
            running_tokens(instance),
            instance.kv_free_tokens if self._needs_room else instance.kv_capacity_tokens,
            instance.max_model_len if instance.max_model_len > 0 else math.inf,
            max(1, instance.block_tokens),
        )


def _group(instance: InstanceView, groups: Sequence[Pool | None]) -> float:
    if instance.state is not InstanceState.ACTIVE or instance.pool not in groups:
        return _NONE
    return float(groups.index(instance.pool))


def _least(values: Floats, among: NDArray[np.intp]) -> tuple[float, int | None]:
    """Return the least delay in seconds and the position of its instance; None: there is none."""
    if not len(among):
        return math.inf, None
    groups, delays, loads = values
    for column in (delays, loads, groups):
        of_these = column[among]
        among = among[of_these == of_these.min()]
    first = int(among[0])
    return float(delays[first]), first
