"""Divided: some instances read prompts, the shortest first, the others write; a whole system in one file."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Migrate, Place, Placement, Refuse, WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool, RequestView
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.policy.base import Policy, Variant
from tailrace.policy.parameters import Parameter


class ShortestPrompt(IntraPolicy):
    """The order inside an instance: the shortest prompt first, and nobody is put back for it."""

    summary = "shortest prompt first"

    def rank(self, job: JobView) -> Rank:
        """By length of prompt, then by arrival."""
        return (job.prompt_tokens, job.arrival)


class Divided(Policy):
    """Prompts to the prefill pool, everything else to the decode pool."""

    parameters = (
        Parameter(
            "prefill_share", float, 0.25, "share of the instances that read prompts", minimum=0.0, maximum=1.0
        ),
    )
    # The order inside each instance, by the name of its entry point.
    batch_order = "shortest_prompt"
    # A handover whose target has no room is refused, and asked for again at the next tick.
    when_full = WhenFull.REFUSE
    tick_interval_s = 0.5
    summary = "fixed pools; the shortest prompt first"

    def __init__(self, *, prefill_share: float = 0.25) -> None:
        """`prefill_share`: what a simulation starts with; a live fleet is told by `tailrace set pool`."""
        self.prefill_share = prefill_share

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """The instance with the fewest prompt tokens to read, of those that are not for decoding."""
        instances = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        readers = [i for i in instances if i.pool is not Pool.DECODE] or instances
        if not readers:
            return Refuse("no active instance")
        return Place(min(readers, key=lambda i: i.prefill_backlog_tokens).instance_id)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over."""
        return self._handed_over(view, [request])

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Ask again for those that found no room."""
        readers = [i for i in view.placeable() if i.pool is Pool.PREFILL]
        waiting = [r for i in readers for r in i.requests if r.output_tokens]
        # One a tick: the view does not know yet where this tick sends them.
        return self._handed_over(view, waiting[:1])

    def _handed_over(self, view: ClusterView, requests: Sequence[RequestView]) -> list[Action]:
        moves: list[Action] = []
        writers = [i for i in view.placeable() if i.pool is Pool.DECODE]
        for request in requests:
            home = view.instances.get(request.instance_id)
            if home is None or home.pool is not Pool.PREFILL or request.migrating or not writers:
                continue
            target = max(writers, key=_free)
            if _free(target) > request.context_tokens:
                there = target.instance_id
                moves.append(Migrate(request.request_id, home.instance_id, there, "prefill done"))
        return moves


def _free(instance: InstanceView) -> int:
    return instance.kv_free_tokens


# A name for a policy with parameters set, as papers have for their ablations.
HALVED = Variant(Divided, {"prefill_share": 0.5})
