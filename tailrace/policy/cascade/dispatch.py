"""Select the instance of a stage that gets an arrival: the least demand (CascadeInfer, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage
from tailrace.perf.steps import Floats
from tailrace.policy.cascade.layout import StageMembers
from tailrace.policy.cascade.room import demand_tokens
from tailrace.policy.columns import Columns, PerInstances

# More requests than an instance has. Shares of demand are below 2**32, so that a rank is exact.
_REQUESTS_MAX: Final = 1 << 20


def demand_share(instance: InstanceView, held_tokens: int = 0) -> int:
    """Return the demand, less what the instance has cached of the arrival, in thousandths of capacity.

    They are whole ones, so that a few tokens do not outweigh the number of requests.
    """
    return (demand_tokens(instance) - held_tokens) * 1_000 // (instance.kv_capacity_tokens or 1)


class LeastDemand:
    """Select by the demand of all instances, by column. Of equal shares of demand the fewest requests decide,
    then the id."""

    def __init__(self) -> None:
        self._ranks = PerInstances(_Ranks)

    def of_stage(self, view: ClusterView, stage: Stage, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance of the stage; None: it has none."""
        return self._ranks.of(view).choose(view, stage, excluded)

    def of_all(self, view: ClusterView, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance; None: there is none."""
        return self._ranks.of(view).choose(view, None, excluded)


class _Ranks:
    """The ranks of one set of instances."""

    def __init__(self) -> None:
        self._columns = Columns(_rank, 1)
        self._members = StageMembers()

    def choose(
        self, view: ClusterView, stage: Stage | None, excluded: Collection[str]
    ) -> InstanceView | None:
        ranks: Floats = self._columns.update(view)[0]
        seen = self._columns.seen
        if excluded:
            ranks = ranks.copy()
            ranks[[seen.at[name] for name in excluded if name in seen.at]] = math.inf
        if stage is None:
            if not len(ranks):
                return None
            first = int(ranks.argmin())
        else:
            members = self._members.of(stage, seen)
            if not len(members):
                return None
            among = ranks[members]
            # A stage may name its instances in any order.
            first = int(members[among == among.min()].min())
        return seen.views[first] if ranks[first] < math.inf else None


def _rank(instance: InstanceView) -> tuple[float]:
    """Return a number that orders instances by share of demand, then by requests; infinite: not active."""
    if instance.state is not InstanceState.ACTIVE:
        return (math.inf,)
    return (float(demand_share(instance) * _REQUESTS_MAX + instance.load),)
