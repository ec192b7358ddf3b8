"""Select the instance of a stage that gets an arrival: the least demand (CascadeInfer, section 4.4)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage
from tailrace.policy.cascade.handover import demand_tokens
from tailrace.policy.columns import Columns, Mask, PerInstances, SeenInstances, smallest

# Stages whose members are remembered: those of a few layouts.
_STAGES_MAX: Final = 64


def demand_share(instance: InstanceView, held_tokens: int = 0) -> int:
    """Return the demand, less what the instance has cached of the arrival, in thousandths of capacity.

    They are whole ones, so that a few tokens do not outweigh the number of requests.
    """
    return (demand_tokens(instance) - held_tokens) * 1_000 // (instance.kv_capacity_tokens or 1)


class LeastDemand:
    """Select by the demand of all instances, by column. Of equal shares of demand the fewest requests decide,
    then the id."""

    def __init__(self) -> None:
        self._members = PerInstances(_Members)

    def of_stage(self, view: ClusterView, stage: Stage, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance of the stage; None: it has none."""
        return self._members.of(view).choose(view, stage, excluded)

    def of_all(self, view: ClusterView, excluded: Collection[str]) -> InstanceView | None:
        """Return an active instance; None: there is none."""
        return self._members.of(view).choose(view, None, excluded)


class _Members:
    """The columns of one set of instances, and the members of the stages that were asked for."""

    def __init__(self) -> None:
        self._columns = Columns(_read, 3)
        self._stages: list[tuple[Stage, Mask]] = []
        # Positions for which these masks were made.
        self._at: dict[str, int] = {}

    def choose(
        self, view: ClusterView, stage: Stage | None, excluded: Collection[str]
    ) -> InstanceView | None:
        active, share, load = self._columns.update(view)
        seen = self._columns.seen
        usable: Mask = active != 0.0
        for name in excluded:
            if (position := seen.at.get(name)) is not None:
                usable[position] = False
        if stage is not None:
            usable &= self._in_stage(stage, seen)
        if not usable.any():
            return None
        usable &= share == share[smallest(share, usable)]
        return seen.views[smallest(load, usable)]

    def _in_stage(self, stage: Stage, seen: SeenInstances) -> Mask:
        if self._at is not seen.at or len(self._stages) >= _STAGES_MAX:
            self._at, self._stages = seen.at, []
        # By identity: to compare stages is to compare the names of all their instances.
        for known, mask in self._stages:
            if known is stage:
                return mask
        mask = np.zeros(len(seen.views), dtype=np.bool_)
        mask[[seen.at[name] for name in stage.instance_ids if name in seen.at]] = True
        self._stages.append((stage, mask))
        return mask


def _read(instance: InstanceView) -> tuple[float, float, float]:
    return float(instance.state is InstanceState.ACTIVE), demand_share(instance), instance.load
