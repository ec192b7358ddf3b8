"""Copies ahead of need: a hot prefix goes to a second instance when the only one that has it is overloaded.

A pull (`pulls.py`) comes with the first request that is placed elsewhere, which waits for it; and none is
placed elsewhere before the queue costs more than the pull. A copy comes before, on a tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.actions import Action, CopyPrefix, Migrate
from tailrace.cluster import NOTHING_HELD, ClusterView, HotPrefix, InstanceState, InstanceView
from tailrace.policy.cascade.layout import stage_of
from tailrace.policy.parameters import Parameter
from tailrace.policy.pulling import pull_s
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.pooled import prefillers

COPY_AHEAD: Final = Parameter(
    "copy_ahead",
    bool,
    False,
    "whether a hot prefix is copied to a second instance in advance if the only one that holds it is "
    "overloaded",
)
# Arrivals of so many seconds tell what is hot.
PERIOD_S: Final = 10.0
# Copies begun on one tick.
MOST: Final = 2
# Room at the target, in lengths of what comes: what runs there grows.
_ROOM: Final = 2


class Copies:
    """By one policy's costs."""

    def __init__(self, costs: Costs, margin: float = 1.0) -> None:
        """`margin`: how many times its transfer a copy must save."""
        self._costs = costs
        self._margin = margin

    def plan(
        self, view: ClusterView, price: Mapping[str, float], moves: Sequence[Action] = ()
    ) -> list[CopyPrefix]:
        """At most one from an instance and one to an instance, `MOST` in all.

        `price`: what one more request costs in seconds, by instance; `moves`: decided on this tick already,
        which copies give way to.
        """
        hot = view.hot
        if hot is None:
            return []
        takers = prefillers(view.placeable())
        planned: list[CopyPrefix] = []
        busy = set(hot.copying).union(move.target_id for move in moves if isinstance(move, Migrate))
        for prefix in hot.prefixes:
            copy = self._of(view, prefix, [i for i in takers if i.instance_id not in busy], price)
            if copy is None or copy.holder_id in busy:
                continue
            busy |= {copy.holder_id, copy.target_id}
            planned.append(copy)
            if len(planned) == MOST:
                break
        return planned

    def _of(
        self,
        view: ClusterView,
        prefix: HotPrefix,
        takers: list[InstanceView],
        price: Mapping[str, float],
    ) -> CopyPrefix | None:
        holder = _only_holder(view, prefix)
        if holder is None:
            return None
        tokens = prefix.cached[holder.instance_id].told
        stage = stage_of(view.stages, holder.instance_id)
        targets = [
            i
            for i in takers
            if i is not holder
            and i.instance_id in prefix.instances
            and stage_of(view.stages, i.instance_id) == stage
            and not i.migrations_in
            and _ROOM * tokens <= i.kv_free_tokens - i.prefill_backlog_tokens - i.coming_tokens
        ]
        if not targets:
            return None
        # Overload is the wait for the first token, or whatever else a request more costs there.
        loads = {i.instance_id: self._costs.first_token_s(i, 0) + price[i.instance_id] for i in targets}
        target = min(targets, key=lambda i: (loads[i.instance_id], i.instance_id))
        own = prefix.cached.get(target.instance_id, NOTHING_HELD)
        steps, lacking = self._costs.steps_of(target), tokens - own.total
        transfer_s = pull_s(target, lacking, self._costs.open_s, self._costs.transfer_s(target, lacking))
        saved_s = steps.compute_s(tokens) - steps.compute_s(self._costs.held_tokens(target, own))
        # Whoever comes would be better off there, by more than the copy takes.
        load_s = self._costs.first_token_s(holder, 0) + price[holder.instance_id]
        # As many will come as have come, and half of them go there.
        if (
            load_s - loads[target.instance_id] < transfer_s
            or prefix.hits / 2 * saved_s < self._margin * transfer_s
        ):
            return None
        request_id = prefix.requests[holder.instance_id]
        return CopyPrefix(request_id, holder.instance_id, target.instance_id, tokens, "hot prefix")


def _only_holder(view: ClusterView, prefix: HotPrefix) -> InstanceView | None:
    """Who holds it and has a request that begins with it, if no other one holds half of that."""
    holder, most = None, 0
    for instance_id in sorted(prefix.requests):
        instance, held = view.instances.get(instance_id), prefix.cached.get(instance_id, NOTHING_HELD)
        if instance is not None and instance.state is not InstanceState.SUSPECT and held.told > most:
            holder, most = instance, held.told
    if holder is None:
        return None
    others = (held for name, held in prefix.cached.items() if name != holder.instance_id)
    return None if any(2 * held.total >= most for held in others) else holder
