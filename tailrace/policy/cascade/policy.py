"""CascadeInfer's policy: a length-aware pipeline of instances (sections 3.2 and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tailrace.actions import Action, Place, Placement, Refuse, SetStages, WhenFull
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    RequestView,
    Stage,
)
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.policy.base import Policy, Variant
from tailrace.policy.candidates import credit
from tailrace.policy.cascade.handover import Handovers, Settle, by_bids, demand_tokens, in_turn
from tailrace.policy.cascade.layout import active_in, earliest_stage, nearest_first, repaired, stage_of
from tailrace.policy.cascade.misplaced import misplaced
from tailrace.policy.cascade.parameters import (
    BID_ASK,
    CHAIN,
    MEMORY,
    ONE_STAGE,
    PARAMETERS,
    PLANNED,
    QOE,
    QUANTITY,
    ROUND_ROBIN,
)
from tailrace.policy.cascade.planner import Planner, chain, exact, no_pipeline
from tailrace.policy.cascade.planning import Planning
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
from tailrace.policy.cascade.traffic import Traffic
from tailrace.policy.deployment import Fact
from tailrace.policy.pulling import pulling
from tailrace.profiles import Profile, load_profile


def periods_elapsed(period_s: float, last_tick_s: float | None, now_s: float) -> int:
    """How many multiples of the period lie in (last_tick_s, now_s]; an infinite period never ends.

    For work that is done once a period, from ticks that come when they come: over all ticks each multiple is
    counted exactly once, however late a tick is.

    Without a previous tick: 1, for when the work was last done is not known. A clock that was set back: 0.
    """
    if math.isinf(period_s):
        return 0
    if last_tick_s is None:
        return 1
    return max(0, math.floor(now_s / period_s) - math.floor(last_tick_s / period_s))


# Of the profiles that come with Tailrace, the one of a model that the paper uses (section 6.1).
PROFILE: Final = "llama-3.1-8b-h100"

# By the values of `layout`, `boundaries` and `handover`. A baseline that balances a sum compares whole
# stages.
_PLANNERS: Final[Mapping[str, Planner]] = {PLANNED: exact, CHAIN: chain, ONE_STAGE: no_pipeline}
_SPLITS: Final[Mapping[str, tuple[Splitter, Sharing]]] = {
    QOE: (optimal_split, divided),
    QUANTITY: (quantity_split, whole),
    MEMORY: (memory_split, whole),
}
_SETTLES: Final[Mapping[str, Settle]] = {BID_ASK: by_bids, ROUND_ROBIN: in_turn}


class Cascade(Policy):
    """Earliest stage at arrival, bid-ask at a boundary and between overloaded peers, stages by the planner.

    What the paper leaves open is settled by the parameters:

    - `profile`: what the QoE model, step times and the KV size of a token come from, unless `model` is given.
      Where instances have been measured, they are the mean of theirs: section 4.1's fit of samples, or what
      follows from their step times.
    - `penalty`: what unequal lengths cost. It counts for whether a stage can keep up, and in Eq. (1), which
      has no term for it, only with `plan_penalty`.
    - `history`: (input, output) lengths of requests to plan for at the start ("collects request
      statistics"), that came in `history_s` seconds. Without any there is one stage until a period is over.
    - `history_in_flight`: how many of the history's requests an instance has at a time. Eq. (1) is about
      batches; 64 is a middling one, and the plan depends on it little.
    - `replan_s`: the period: how often to plan, and from the requests of how long ("collects request
      statistics over the period ... and generates pipeline settings for the next period"). A minute: several
      lives of a request.
    - `plan_requests`: least requests an instance in a period, on average: the five of section 4.3, for its
      reason. Of fewer, each one shifts the distribution.
    - `least_plan_gain`: by what share a plan must be better, by Eq. (1), than the present layout, or than one
      stage where there is none. A twentieth, because each change makes requests move. Under light load D_0,
      which no layout changes, outweighs the rest: nothing gains a twentieth, and the system is ordinary
      multi-instance scheduling, as the paper's (section 6.2).
    - `most_work`: how much of what an instance can do a plan may give it (`stage_work`); 0: no limit, the
      paper's letter. 1.0 is no margin: what has more falls behind for certain.
    - `refine_s`, `smoothing`: section 4.3's interval and moving average.
    - `outlier`: an instance is overloaded at that much of its stage's mean demand ("25% above").
    - `bandwidth_bytes_per_s`: of a transfer, for the cost of cuts: the testbed's 400 Gbit/s (section 6.1).
    - Prefill runs in the stage of the prompt's length ("performs prefill and decoding locally").
    - Within the stage, an arrival goes where a request handed over would: the least demand.
    """

    needs = (Fact.PROFILE, Fact.PENALTY)
    parameters = PARAMETERS
    # "Migration is skipped if no idle cache is available" (section 5).
    when_full = WhenFull.REFUSE
    summary = "CascadeInfer: length stages, bid-ask handover and rebalance, adaptive boundaries"

    def __init__(
        self,
        profile: Profile | None = None,
        penalty: FittedLengthPenalty | None = None,
        model: QoeModel | None = None,
        history: Sequence[tuple[int, int]] = (),
        history_s: float | None = None,
        history_in_flight: float = 64.0,
        plan_requests: float = 5.0,
        replan_s: float = 60.0,
        least_plan_gain: float = 0.05,
        most_work: float = 1.0,
        plan_penalty: bool = False,
        refine_s: float = 5.0,
        smoothing: float = 0.2,
        outlier: float = 1.25,
        bandwidth_bytes_per_s: float = 50e9,
        max_length: int = 131_072,
        tick_interval_s: float = 1.0,
        cache_aware: bool = False,
        pulls: bool = False,
        handover: str = BID_ASK,
        rebalance: bool = True,
        layout: str = PLANNED,
        boundaries: str = QOE,
    ) -> None:
        self.handover = handover
        self.settle = _SETTLES[handover]
        self.rebalances = rebalance
        self.split, self.share = _SPLITS[boundaries]
        profile = profile if profile is not None else load_profile(PROFILE)
        self.history = Traffic.of_history(history, history_s)
        self.history_in_flight = history_in_flight
        self.replan_s = replan_s
        self.lengths_period_s = replan_s if math.isfinite(replan_s) else None
        self.refine_s = refine_s
        self.smoothing = smoothing
        self.outlier = outlier
        self.tick_interval_s = tick_interval_s
        self.cache_aware = cache_aware
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, pulls)
        self.planning = Planning(
            planner=_PLANNERS[layout],
            profile=profile,
            model=model if model is not None else QoeModel.of_profile(profile),
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            max_length=max_length,
            penalty=penalty,
            weighs_penalty=plan_penalty,
            most_work=most_work if most_work > 0.0 else math.inf,
            least_requests=plan_requests,
            least_gain=least_plan_gain,
            # A baseline that is a layout holds whatever it costs.
            insists=layout != PLANNED,
        )

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
                    return self.pull(view, arrival, Place(self._dispatch(usable, arrival).instance_id))
        usable = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        if not usable:
            return Refuse("no active instance")
        return self.pull(view, arrival, Place(self._dispatch(usable, arrival).instance_id))

    def _dispatch(self, instances: Sequence[InstanceView], arrival: Arrival) -> InstanceView:
        if self.handover == ROUND_ROBIN:
            return instances[arrival.seq % len(instances)]
        held = credit(arrival, self.cache_aware, self.nominal)
        return min(instances, key=lambda i: _dispatch_key(i, held(i)))

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
        """Stages first (members, plan, boundaries), then prompts that wait in a stage that is no longer
        theirs, then handovers that are due, then outliers."""
        stages = self._stages(view, now)
        actions: list[Action] = [SetStages(stages)] if stages != view.stages else []
        # By the stages that placements go by already.
        actions += misplaced(view)
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
        stages = view.stages
        if not stages and self.history.requests:
            return self.planning.first(members, self.history, self.history_in_flight)
        if stages:
            demand = {i.instance_id: demand_tokens(i) for i in members}
            stages = repaired(stages, demand.keys(), demand)
        if view.lengths is not None and periods_elapsed(self.replan_s, view.last_tick_s, now):
            planned = self.planning.anew(members, stages, view.lengths)
            if planned is not None:
                return planned
        refinements = periods_elapsed(self.refine_s, view.last_tick_s, now)
        if refinements and len(stages) > 1:
            model, _ = self.planning.models(members)
            # What a late tick has missed is made up for: n steps of the moving average at once.
            smoothing = 1.0 - (1.0 - self.smoothing) ** refinements
            refinement = Refinement(model, self.split, smoothing, share=self.share)
            return refinement.refine(stages, _rows(members))
        return stages


# Section 6.5: figures 16, 14 and 15.
INTER_STAGE_ONLY: Final = Variant(Cascade, {"rebalance": False})
IN_TURN: Final = Variant(Cascade, {"handover": ROUND_ROBIN, "rebalance": False})
IN_A_CHAIN: Final = Variant(Cascade, {"layout": CHAIN})
NO_PIPELINE: Final = Variant(Cascade, {"layout": ONE_STAGE})
BY_QUANTITY: Final = Variant(Cascade, {"boundaries": QUANTITY})
BY_MEMORY: Final = Variant(Cascade, {"boundaries": MEMORY})


def _dispatch_key(instance: InstanceView, held_tokens: int) -> tuple[int, int, str]:
    """Whole thousandths of capacity, so that a few tokens do not outweigh the number of requests."""
    share = (demand_tokens(instance) - held_tokens) * 1_000 // (instance.kv_capacity_tokens or 1)
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
