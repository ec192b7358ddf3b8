"""Divided: prefill and decode on separate instances, shortest prompt first; a whole system in one file."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Migrate, Place, Placement, Refuse, WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool, RequestView
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.policy.base import Policy
from tailrace.policy.parameters import parameter


class ShortestPrompt(IntraPolicy):
    """The order inside an instance: the shortest prompt first, without preemption."""

    summary = "shortest prompt first"

    def rank(self, job: JobView) -> Rank:
        """Rank by prompt length, then by arrival."""
        return (job.prompt_tokens, job.arrival)


class Divided(Policy):
    """Place prompts in the prefill pool, and hand them over to the decode pool."""

    prefill_share: float = parameter(0.25, "share of the instances that prefill", minimum=0.0, maximum=1.0)
    # The order inside each instance, by the name of its entry point.
    batch_order = "shortest_prompt"
    # A handover whose target has no room is refused, and ordered again at the next tick.
    when_full = WhenFull.REFUSE
    tick_interval_s = 0.5
    summary = "fixed pools; the shortest prompt first"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Choose the instance with the fewest waiting prompt tokens, among those that prefill."""
        instances = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        prefillers = [i for i in instances if i.pool is not Pool.DECODE] or instances
        if not prefillers:
            return Refuse("no active instance")
        return Place(min(prefillers, key=lambda i: i.prefill_backlog_tokens).instance_id)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand the request over to a decode instance."""
        return self._handovers(view, [request])

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Retry a handover that found no room."""
        prefillers = [i for i in view.placeable() if i.pool is Pool.PREFILL]
        waiting = [r for i in prefillers for r in i.requests if r.output_tokens]
        # One per tick: the view does not include this tick's own handovers yet.
        return self._handovers(view, waiting[:1])

    def _handovers(self, view: ClusterView, requests: Sequence[RequestView]) -> list[Action]:
        moves: list[Action] = []
        decoders = [i for i in view.placeable() if i.pool is Pool.DECODE]
        for request in requests:
            home = view.instances.get(request.instance_id)
            if home is None or home.pool is not Pool.PREFILL or request.migrating or not decoders:
                continue
            target = max(decoders, key=_free)
            if _free(target) > request.context_tokens:
                target_id = target.instance_id
                moves.append(Migrate(request.request_id, home.instance_id, target_id, "prefill done"))
        return moves


def _free(instance: InstanceView) -> int:
    return instance.kv_free_tokens
