"""CascadeInfer's policy: a length-aware pipeline of instances (sections 3.2 and 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tailrace.actions import Action, Place, Placement, Refuse, SetStages
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    RequestView,
    Stage,
)
from tailrace.policy.base import Policy
from tailrace.policy.cascade.handover import Handovers, Settle, by_bids, demand_tokens, in_turn
from tailrace.policy.cascade.layout import active_in, earliest_stage, nearest_first, repaired, stage_of
from tailrace.policy.cascade.parameters import PARAMETERS
from tailrace.policy.cascade.planner import Costs, Plan, chain, exact, layout_cost, no_pipeline
from tailrace.policy.cascade.qoe import QoeModel
from tailrace.policy.cascade.refinement import (
    Refinement,
    Sharing,
    Splitter,
    divided,
    memory_split,
    optimal_split,
    quantity_split,
    whole,
)
from tailrace.policy.cascade.workload import Workload, bucket_edges
from tailrace.policy.deployment import Fact
from tailrace.policy.periods import periods_elapsed
from tailrace.policy.when_full import WhenFull
from tailrace.profiles import Profile, load_profile

# Of the profiles that come with Tailrace, the one of a model that the paper uses (section 6.1).
PROFILE: Final = "llama-3.1-8b-h100"


class Cascade(Policy):
    """Earliest stage at arrival, bid-ask at a boundary and between overloaded peers, stages by the planner.

    What the paper leaves open is settled by the parameters:

    - `profile`: what the QoE model and the KV size of a token come from, unless `model` is given. Where
      instances have been measured, both are the mean of theirs: section 4.1's fit of samples, or what follows
      from their step times.
    - `history`: (input, output) lengths of requests to plan for at the start ("collects request
      statistics"). Without any there are no stages until requests are in flight to plan for.
    - `history_in_flight`: how many of the history's requests an instance has at a time. Eq. (1) is about
      batches; 64 is a middling one, and the plan depends on it little.
    - `plan_requests`: planning from requests in flight needs that many an instance, on average: the five of
      section 4.3, for its reason. Of fewer, each one that comes or goes shifts the distribution.
    - `replan_s`, `least_plan_gain`: how often to replan from the requests in flight, and by what share a plan
      must be better, by Eq. (1), than the present layout, or than one stage where there is none. A minute:
      several lives of a request; a twentieth, because each change makes requests move. Under light load
      D_0, which no layout changes, outweighs the rest: nothing gains a twentieth, and the system is
      ordinary multi-instance scheduling, as the paper's (section 6.2).
    - `refine_s`, `smoothing`: section 4.3's interval and moving average.
    - `outlier`: an instance is overloaded at that much of its stage's mean demand ("25% above").
    - `bandwidth_bytes_per_s`: of a transfer, for the cost of cuts: the testbed's 400 Gbit/s (section 6.1).
    - Prefill runs in the stage of the prompt's length ("performs prefill and decoding locally").
    - Within the stage, an arrival goes where a request handed over would: the least demand.
    """

    needs = (Fact.PROFILE,)
    parameters = PARAMETERS
    # "Migration is skipped if no idle cache is available" (section 5).
    when_full = WhenFull.REFUSE
    summary = "CascadeInfer: length stages, bid-ask handover and rebalance, adaptive boundaries"

    planner = staticmethod(exact)
    split: Splitter = staticmethod(optimal_split)
    share: Sharing = staticmethod(divided)
    # How it is found who takes a request over.
    settle: Settle = staticmethod(by_bids)
    rebalances = True
    # The planner's layout holds whatever it costs: for baselines that are a layout.
    insists = False

    def __init__(
        self,
        profile: Profile | None = None,
        model: QoeModel | None = None,
        history: Sequence[tuple[int, int]] = (),
        history_in_flight: float = 64.0,
        plan_requests: float = 5.0,
        replan_s: float = 60.0,
        least_plan_gain: float = 0.05,
        refine_s: float = 5.0,
        smoothing: float = 0.2,
        outlier: float = 1.25,
        bandwidth_bytes_per_s: float = 50e9,
        max_length: int = 131_072,
        tick_interval_s: float = 1.0,
    ) -> None:
        profile = profile if profile is not None else load_profile(PROFILE)
        self.model = model if model is not None else QoeModel.of_profile(profile)
        self.history = tuple(history)
        self.history_in_flight = history_in_flight
        self.plan_requests = plan_requests
        self.replan_s = replan_s
        self.least_plan_gain = least_plan_gain
        self.refine_s = refine_s
        self.outlier = outlier
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.transfer_s_per_token = profile.kv_bytes_per_token / bandwidth_bytes_per_s
        self.max_length = max_length
        self.edges = bucket_edges(max_length)
        self.tick_interval_s = tick_interval_s
        self.smoothing = smoothing

    # ---- section 3.2

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """The earliest stage that covers the length; the nearest, longer ones first, if it has nobody.

        Without stages, and beside all stages for instances in none, the whole cluster is one stage.
        """
        stages = view.stages
        if stages:
            at = earliest_stage(stages, arrival.prompt_tokens + arrival.output_tokens)
            for number in nearest_first(len(stages), at):
                usable = [i for i in active_in(view, stages[number]) if i.instance_id not in arrival.excluded]
                if usable:
                    return Place(self._dispatch(usable, arrival).instance_id)
        usable = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        return Place(self._dispatch(usable, arrival).instance_id) if usable else Refuse("no active instance")

    def _dispatch(self, instances: Sequence[InstanceView], arrival: Arrival) -> InstanceView:
        return min(instances, key=_dispatch_key)

    # ---- section 4.4, inter-stage

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over to the stage that covers the length now, by bid-ask; () where nobody has room.

        "Migration is skipped if no idle cache is available" (section 5); it is tried again at the next
        refinement.
        """
        at = stage_of(view.stages, request.instance_id)
        return () if at is None else Handovers(view, self.settle).outgrown(view.stages, [(at, request)])

    # ---- tick

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Stages first (members, plan, boundaries), then handovers that are due, then outliers."""
        stages = self._stages(view, now)
        actions: list[Action] = [SetStages(stages)] if stages != view.stages else []
        handovers = Handovers(view, self.settle)
        if periods_elapsed(self.refine_s, view.last_tick_s, now):
            actions += handovers.outgrown(stages, _requests(view, stages))
        if self.rebalances:
            # Without stages the whole cluster is one.
            for peers in [active_in(view, stage) for stage in stages] or [view.placeable()]:
                actions += handovers.rebalance(peers, self.outlier)
        return actions

    def _stages(self, view: ClusterView, now: float) -> tuple[Stage, ...]:
        members = _members(view)
        demand = {i.instance_id: demand_tokens(i) for i in members}
        if not view.stages:
            plan = self._first_plan(members)
            return plan.stages(sorted(demand)) if plan is not None else ()
        stages = repaired(view.stages, demand.keys(), demand)
        if periods_elapsed(self.replan_s, view.last_tick_s, now):
            workload = self._in_flight(members)
            planned = self._replanned(members, workload, stages)
            if planned is not None:
                return planned
        refinements = periods_elapsed(self.refine_s, view.last_tick_s, now)
        if refinements and len(stages) > 1:
            model, _ = self._models(members)
            # What a late tick has missed is made up for: n steps of the moving average at once.
            smoothing = 1.0 - (1.0 - self.smoothing) ** refinements
            refinement = Refinement(model, self.split, smoothing, share=self.share)
            return refinement.refine(stages, _rows(members))
        return stages

    def _first_plan(self, members: Sequence[InstanceView]) -> Plan | None:
        """None: nothing to plan for yet."""
        if not members:
            return None
        if self.history:
            inputs, outputs = [h[0] for h in self.history], [h[1] for h in self.history]
            in_flight = self.history_in_flight * len(members)
            return self._plan(members, Workload.of_history(self.edges, inputs, outputs, in_flight))
        if sum(i.running for i in members) < self.plan_requests * len(members):
            return None
        costs = self._costs(members, self._in_flight(members))
        plan = self.planner(costs, len(members))
        if not self.insists and not self._gains(plan, no_pipeline(costs, len(members)).cost):
            return None
        return plan

    def _gains(self, plan: Plan, present_cost: float) -> bool:
        return plan.cost <= (1.0 - self.least_plan_gain) * present_cost

    def _models(self, members: Sequence[InstanceView]) -> tuple[QoeModel, float]:
        """QoE, and seconds to transfer a token's KV: of those that were measured, if any was."""
        measured = [i.measured for i in members if i.measured is not None]
        if not measured:
            return self.model, self.transfer_s_per_token
        kv_bytes = sum(m.profile.kv_bytes_per_token for m in measured) / len(measured)
        return QoeModel.mean([m.qoe for m in measured]), kv_bytes / self.bandwidth_bytes_per_s

    def _costs(self, members: Sequence[InstanceView], workload: Workload) -> Costs:
        return Costs(workload, *self._models(members))

    def _plan(self, members: Sequence[InstanceView], workload: Workload) -> Plan:
        return self.planner(self._costs(members, workload), len(members))

    def _in_flight(self, members: Sequence[InstanceView]) -> Workload:
        rows = [row for part in _rows(members).values() for row in part]
        return Workload.of_snapshot(self.edges, [r[0] for r in rows], [r[1] for r in rows])

    def _replanned(
        self, members: Sequence[InstanceView], workload: Workload, stages: Sequence[Stage]
    ) -> tuple[Stage, ...] | None:
        """A plan that is better by `least_plan_gain`, with instances kept in the order of their stages."""
        names = [name for stage in stages for name in stage.instance_ids]
        if not names or workload.requests < self.plan_requests * len(names):
            return None
        costs = self._costs(members, workload)
        plan = self.planner(costs, len(names))
        cuts = [stages[0].lo, *(stage.hi for stage in stages)]
        counts = [len(stage.instance_ids) for stage in stages]
        present = layout_cost(workload, *self._models(members), cuts, counts)
        return plan.stages(names) if self._gains(plan, present) else None


class CascadeInterStageOnly(Cascade):
    """Bid-ask between stages alone (section 6.5, Figure 16)."""

    summary = "CascadeInfer without rebalance inside a stage"
    rebalances = False


class CascadeRoundRobin(Cascade):
    """Whoever's turn it is within the stage, at arrival and at handover (section 6.5, Figure 16)."""

    summary = "CascadeInfer with round robin within a stage in place of bid-ask"
    settle: Settle = staticmethod(in_turn)
    rebalances = False

    def _dispatch(self, instances: Sequence[InstanceView], arrival: Arrival) -> InstanceView:
        return instances[arrival.seq % len(instances)]


class CascadeChain(Cascade):
    """One instance a stage (section 6.5, Figure 14)."""

    summary = "CascadeInfer's baseline: a chain of stages with one instance each"
    insists = True
    planner = staticmethod(chain)


class CascadeNoPipeline(Cascade):
    """All instances in one stage (section 6.5, Figure 14)."""

    summary = "CascadeInfer's baseline: one stage, with rebalance"
    insists = True
    planner = staticmethod(no_pipeline)


class CascadeQuantity(Cascade):
    """Boundaries that balance the number of requests (section 6.5, Figure 15)."""

    summary = "CascadeInfer's baseline: boundaries refined by number of requests"
    split: Splitter = staticmethod(quantity_split)
    share: Sharing = staticmethod(whole)


class CascadeMemory(Cascade):
    """Boundaries that balance KV memory (section 6.5, Figure 15)."""

    summary = "CascadeInfer's baseline: boundaries refined by memory"
    split: Splitter = staticmethod(memory_split)
    share: Sharing = staticmethod(whole)


def _dispatch_key(instance: InstanceView) -> tuple[int, int, str]:
    """Whole thousandths of capacity, so that a few tokens do not outweigh the number of requests."""
    share = demand_tokens(instance) * 1_000 // (instance.kv_capacity_tokens or 1)
    return share, instance.load, instance.instance_id


def _members(view: ClusterView) -> list[InstanceView]:
    """Instances that stages are made of: those that leave are not, a suspect may come back."""
    return [i for i in view.instances.values() if i.state is not InstanceState.DRAINING]


def _requests(view: ClusterView, stages: Sequence[Stage]) -> Iterator[tuple[int, RequestView]]:
    """Those of all stages but the last, which nothing outgrows, with the numbers of their stages."""
    for at, stage in enumerate(stages[:-1]):
        for name in stage.instance_ids:
            for request in view.instances[name].requests:
                yield at, request


def _rows(members: Sequence[InstanceView]) -> Mapping[str, list[tuple[int, int]]]:
    return {i.instance_id: [(r.prompt_tokens, r.context_tokens) for r in i.requests] for i in members}
