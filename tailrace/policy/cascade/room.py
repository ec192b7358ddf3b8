"""The room that instances have for handovers, by column, less what one decision has reserved of it.

Lengths in tokens. Instances are identified by their positions in the view, which are in id order. The numbers
are integers below 2**53, so that sums and differences are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from tailrace.cluster import ClusterView, InstanceState, InstanceView, RequestView, Stage
from tailrace.perf.steps import Floats
from tailrace.policy.candidates import needed_tokens
from tailrace.policy.cascade.layout import Positions, StageMembers
from tailrace.policy.columns import Columns, PerInstances
from tailrace.policy.requests import Mask

_COLUMNS: Final = 7


def demand_tokens(instance: InstanceView) -> int:
    """Return the request-memory demand of an instance: KV used and queued (section 4.4)."""
    return instance.kv_used_tokens + instance.prefill_backlog_tokens


class RoomOfInstances:
    """The columns of each set of instances, kept between decisions."""

    def __init__(self) -> None:
        self._kept = PerInstances(_Kept)

    def of(self, view: ClusterView, transfers: int | None) -> Room:
        """Return the room for one decision. `transfers`: see `Room`."""
        kept = self._kept.of(view)
        return Room(kept.columns.update(view), view, kept, transfers)


class _Kept:
    def __init__(self) -> None:
        self.columns = Columns(_read, _COLUMNS)
        self.members = StageMembers()


class Room:
    """What the instances of a view have room for during one decision, which calls `reserve` for each
    handover."""

    def __init__(self, columns: Floats, view: ClusterView, kept: _Kept, transfers: int | None) -> None:
        """`transfers`: maximum number of open migrations per instance and direction; None: no limit."""
        active, free, demand, self._block, self._longest, arriving, leaving = columns
        self.names: Sequence[str] = kept.columns.seen.names
        self._instances = view.instances
        # Demand without what is reserved.
        self.demand: Floats = demand
        self._kept = kept
        self._active: Mask = active != 0.0
        # After reservations; -1 where no transfer is accepted.
        self._free = free.copy()
        self._reserved = np.zeros(len(free))
        self._arriving = arriving.copy()
        if transfers is not None:
            self._free[arriving >= transfers] = -1.0
        self._transfers = transfers
        self._open = int(leaving.sum())
        self._left: Counter[str] = Counter()
        self._moved: set[str] = set()

    @property
    def handovers(self) -> int:
        """Return the number of handovers that are open or reserved."""
        return self._open + len(self._moved)

    def instance(self, position: int) -> InstanceView:
        """Return the instance at a position."""
        return self._instances[self.names[position]]

    def active(self, stage: Stage | None) -> Positions:
        """Return the active instances of a stage in its order; without a stage, all active ones."""
        if stage is None:
            return np.flatnonzero(self._active)
        members = self._kept.members.of(stage, self._kept.columns.seen)
        return members[self._active[members]]

    def may_send(self, source: InstanceView, request: RequestView) -> bool:
        """Return whether the request is not moving, and its source may open another transfer."""
        if request.migrating or request.request_id in self._moved:
            return False
        return self._transfers is None or (
            source.migrations_out + self._left[source.instance_id] < self._transfers
        )

    def for_request(self, request: RequestView, limit: float) -> Mask:
        """Return which instances may receive the request: active, with a free transfer, and with free KV for
        its whole context and one block to grow into.

        `limit`: maximum demand of a receiver including the request.
        """
        context = request.context_tokens
        tokens = max(request.kv_tokens, context)
        # As `candidates.kv_needed_tokens`.
        needed = (np.ceil(tokens / self._block) + 1.0) * self._block
        able: Mask = needed <= self._free
        able &= context < self._longest
        if limit < math.inf:
            able &= self.demand + self._reserved + context <= limit
        source = self._kept.columns.seen.at.get(request.instance_id)
        if source is not None:
            able[source] = False
        return able

    def headroom(self, among: Positions, limit: float) -> float:
        """Return the largest context for which any of these instances may have room; -1: none accepts a
        transfer."""
        left = np.minimum(self._free, limit - self.demand - self._reserved)
        return float(left[among].max(initial=-1.0))

    def least_demand(self, among: Positions, count: int) -> Positions:
        """Return at most `count` instances with the least demand including what is reserved: the least one
        first, the first by id of equals, and the others in the order given.

        `among` must not be empty.
        """
        demand = self.demand[among] + self._reserved[among]
        if len(among) > count:
            least = np.sort(demand.argpartition(count)[:count])
            among, demand = among[least], demand[least]
        first = among[demand == demand.min()].min()
        return np.concatenate(([first], among[among != first]))

    def reserve(self, request: RequestView, target: int) -> None:
        """Reserve room for a handover."""
        needed = needed_tokens(request, self.instance(target))
        self._free[target] -= needed
        self._reserved[target] += needed
        self._arriving[target] += 1.0
        if self._transfers is not None and self._arriving[target] >= self._transfers:
            self._free[target] = -1.0
        self._left[request.instance_id] += 1
        self._moved.add(request.request_id)


def _read(instance: InstanceView) -> tuple[float, ...]:
    active = instance.state is InstanceState.ACTIVE
    return (
        float(active),
        instance.kv_free_tokens if active else -1,
        demand_tokens(instance),
        max(1, instance.block_tokens),
        instance.max_model_len if instance.max_model_len > 0 else math.inf,
        instance.migrations_in,
        instance.migrations_out,
    )
