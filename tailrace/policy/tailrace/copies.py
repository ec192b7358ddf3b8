"""Copy a hot prefix to a second instance in advance when the only instance that holds it is overloaded.

A pull (`pulls.py`) happens only once a request is placed elsewhere, that is, when the queue already costs
more than the pull, and that request has to wait for it. A copy is made on a tick, before any request needs
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.actions import Action, CopyPrefix, Migrate
from tailrace.cluster import NOTHING_HELD, ClusterView, HotPrefix, InstanceState, InstanceView
from tailrace.policy.parameters import parameter
from tailrace.policy.pulling import pull_s
from tailrace.policy.tailrace.costs import Costs

COPY_AHEAD: Final = parameter(
    False,
    "whether a hot prefix is copied to a second instance in advance if the only one that holds it is "
    "overloaded",
)
# Prefixes are hot by the arrivals of this many seconds.
PERIOD_S: Final = 10.0
# Maximum number of copies started per tick.
COPIES_MAX: Final = 2
# Free KV required at the target, as a multiple of the prefix: its running requests also grow.
_ROOM_FACTOR: Final = 2


class Copies:
    """Plan copies that pay by the policy's cost model."""

    def __init__(self, costs: Costs, margin: float = 1.0) -> None:
        """`margin`: minimum saving of a copy, as a multiple of its transfer time."""
        self._costs = costs
        self._margin = margin

    def plan(
        self, view: ClusterView, price: Mapping[str, float], moves: Sequence[Action] = ()
    ) -> list[CopyPrefix]:
        """Return at most `COPIES_MAX` copies, and at most one per instance.

        `price`: cost of one more request in seconds, by instance; `moves`: actions already decided on this
        tick, which take precedence over copies.
        """
        hot = view.hot
        if hot is None:
            return []
        takers = view.placeable()
        planned: list[CopyPrefix] = []
        busy = set(hot.copying).union(move.target_id for move in moves if isinstance(move, Migrate))
        for prefix in hot.prefixes:
            copy = self._plan_copy(view, prefix, [i for i in takers if i.instance_id not in busy], price)
            if copy is None or copy.holder_id in busy:
                continue
            busy |= {copy.holder_id, copy.target_id}
            planned.append(copy)
            if len(planned) == COPIES_MAX:
                break
        return planned

    def _plan_copy(
        self,
        view: ClusterView,
        prefix: HotPrefix,
        takers: list[InstanceView],
        price: Mapping[str, float],
    ) -> CopyPrefix | None:
        holder = _only_holder(view, prefix)
        if holder is None:
            return None
        tokens = prefix.cached[holder.instance_id].reported
        targets = [
            i
            for i in takers
            if i is not holder
            and i.instance_id in prefix.instances
            and not i.migrations_in
            and _ROOM_FACTOR * tokens <= i.kv_free_tokens - i.prefill_backlog_tokens - i.coming_tokens
        ]
        if not targets:
            return None
        # Overload is measured as the wait for a first token plus the cost of decoding one more request.
        loads = {i.instance_id: self._wait_s(i) + price[i.instance_id] for i in targets}
        target = min(targets, key=lambda i: (loads[i.instance_id], i.instance_id))
        target_tokens = prefix.cached.get(target.instance_id, NOTHING_HELD)
        steps, lacking = self._costs.steps_of(target), tokens - target_tokens.total
        transfer_s = pull_s(target, lacking, self._costs.open_s, self._costs.transfer_s(target, lacking))
        saved_s = steps.compute_s(tokens) - steps.compute_s(self._costs.usable_tokens(target, target_tokens))
        # A copy must make the next arrival better off at the target by more than the transfer takes.
        load_s = self._wait_s(holder) + price[holder.instance_id]
        # Expect as many arrivals as in the last period, and half of them at the target.
        if (
            load_s - loads[target.instance_id] < transfer_s
            or prefix.hits / 2 * saved_s < self._margin * transfer_s
        ):
            return None
        request_id = prefix.requests[holder.instance_id]
        return CopyPrefix(request_id, holder.instance_id, target.instance_id, tokens, "hot prefix")

    def _wait_s(self, instance: InstanceView) -> float:
        """Return the seconds until a prompt that arrives now would start: the prefill of the queue, in steps
        shared with decodes, and the step in progress."""
        steps, queued = self._costs.steps_of(instance), instance.prefill_backlog_tokens
        step_s = steps.decode_s(instance.running, instance.kv_used_tokens)
        return (queued / steps.chunk_tokens + 1.0) * step_s + steps.backlog_s(
            queued, max(1, instance.waiting)
        )


def _only_holder(view: ClusterView, prefix: HotPrefix) -> InstanceView | None:
    """Return the instance that holds the prefix and has a request that begins with it; None if another
    instance holds at least half as much."""
    holder, most_blocks = None, 0
    for instance_id in sorted(prefix.requests):
        instance, held = view.instances.get(instance_id), prefix.cached.get(instance_id, NOTHING_HELD)
        if (
            instance is not None
            and instance.state is not InstanceState.SUSPECT
            and held.reported > most_blocks
        ):
            holder, most_blocks = instance, held.reported
    if holder is None:
        return None
    others = (held for name, held in prefix.cached.items() if name != holder.instance_id)
    return None if any(2 * held.total >= most_blocks for held in others) else holder
