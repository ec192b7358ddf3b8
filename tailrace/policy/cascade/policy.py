"""CascadeInfer's policy: a length-aware pipeline of instances (sections 3.2 and 4).

`planner` has the stage partition of section 4.2, `refinement` the range refinement of section 4.3, and
`handover` the handovers and rebalancing of section 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.actions import Action, Place, Placement, Refuse, SetStages, WhenFull
from tailrace.cluster import (
    LENGTH_MAX,
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
from tailrace.policy.base import Policy
from tailrace.policy.candidates import CACHE_AWARE, credit
from tailrace.policy.cascade.dispatch import LeastDemand, demand_share, has_slot, misplaced
from tailrace.policy.cascade.handover import Handovers, ReceiverChoice, by_bids, round_robin
from tailrace.policy.cascade.layout import active_in, earliest_stage, nearest_first, repaired, stage_of
from tailrace.policy.cascade.planner import Planner, chain, exact, no_pipeline
from tailrace.policy.cascade.planning import Planning
from tailrace.policy.cascade.refinement import (
    Lengths,
    Refinement,
    Sharing,
    Splitter,
    divided,
    memory_split,
    optimal_split,
    quantity_split,
    whole,
)
from tailrace.policy.cascade.room import RoomOfInstances, demand_tokens
from tailrace.policy.cascade.workload import Traffic
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.policy.requests import table_of
from tailrace.profiles import Profile, load_profile

# Values of `handover`.
BID_ASK: Final = "bid_ask"
ROUND_ROBIN: Final = "round_robin"
# Values of `layout`.
PLANNED: Final = "planned"
CHAIN: Final = "chain"
ONE_STAGE: Final = "one_stage"
# Values of `boundaries`.
QOE: Final = "qoe"
QUANTITY: Final = "quantity"
MEMORY: Final = "memory"


class Parameters(Policy):
    """What users may set of the policy."""

    handover: str = parameter(
        BID_ASK,
        "how the receiver of a request within a stage is chosen: by bids, or round robin, also at arrival",
        source="CascadeInfer, section 4.4; round_robin is the baseline of its section 6.5",
        choices=(BID_ASK, ROUND_ROBIN),
    )
    rebalance: bool = parameter(
        True,
        "whether overloaded instances hand requests over to peers of their stage",
        source="CascadeInfer, section 4.4; without it: section 6.5's inter-stage only",
    )
    layout: str = parameter(
        PLANNED,
        "stages from the planner, one instance per stage, or all instances in one",
        source="CascadeInfer, section 4.2; the others are baselines of its section 6.5",
        choices=(PLANNED, CHAIN, ONE_STAGE),
    )
    boundaries: str = parameter(
        QOE,
        "what boundary refinement balances: the QoE model's cost, the number of requests, or KV memory",
        source="CascadeInfer, section 4.3; the others are baselines of its section 6.5",
        choices=(QOE, QUANTITY, MEMORY),
    )
    history_in_flight: float = parameter(
        64.0,
        "concurrent requests per instance in the history, for the first plan",
        unit="requests",
        source="ours, of CascadeInfer's Eq. (1)",
        minimum=1.0,
    )
    plan_requests: float = parameter(
        5.0,
        "minimum arrivals per instance in a period for planning from it",
        unit="requests",
        source="CascadeInfer, section 4.3",
        minimum=0.0,
    )
    replan_s: float = parameter(
        60.0,
        "interval between plans, and length of the period whose requests they use",
        unit="s",
        minimum=0.1,
    )
    least_plan_gain: float = parameter(
        0.05, "minimum improvement of a plan over the current layout, by Eq. (1)", minimum=0.0, maximum=1.0
    )
    most_work: float = parameter(
        1.0,
        "maximum work that a plan may assign to an instance, relative to its capacity with full KV; 0: no "
        "limit",
        source="ours; CascadeInfer has no limit",
        minimum=0.0,
    )
    plan_penalty: bool = parameter(
        False,
        "whether plans include the cost of unequal lengths, by the deployment's length penalty",
        source="ours; CascadeInfer's Eq. (1) has no such term",
    )
    overflow: bool = parameter(
        False,
        "whether an arrival whose stage has no free slot in its batches goes to the next stage that has one",
        source="false: CascadeInfer, section 3.2; true: ours",
    )
    refine_s: float = parameter(
        5.0,
        "interval between boundary refinements",
        unit="s",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.1,
    )
    smoothing: float = parameter(
        0.2,
        "weight of a new boundary in the moving average",
        source="ours, of CascadeInfer's section 4.3",
        minimum=0.0,
        maximum=1.0,
    )
    outlier: float = parameter(
        1.25,
        "an instance is overloaded above this multiple of its stage's mean demand",
        source="CascadeInfer, section 4.4",
        minimum=1.0,
    )
    bandwidth_bytes_per_s: float = parameter(
        50e9,
        "bandwidth of a KV transfer, for the cost of cuts",
        unit="bytes/s",
        source="CascadeInfer, section 6.1 (400 Gbit/s)",
        minimum=1.0,
    )
    max_length: int = parameter(
        131_072,
        "longest context covered by plans",
        unit="tokens",
        source="CascadeInfer, section 6 (128K)",
        minimum=1,
        maximum=LENGTH_MAX,
    )
    tick_interval_s: float = parameter(
        1.0, "interval between ticks, which look for outliers and run what is due", unit="s", minimum=0.01
    )
    cache_aware: bool = CACHE_AWARE
    pulls: bool = PULLS


def periods_elapsed(period_s: float, last_tick_s: float | None, now_s: float) -> int:
    """Return how many multiples of the period lie in (last_tick_s, now_s]; an infinite period never ends.

    For work done once per period on ticks that may be late: over all ticks, each multiple is counted exactly
    once. Without a previous tick: 1, since it is unknown when the work was last done. If the clock was set
    back: 0.
    """
    if math.isinf(period_s):
        return 0
    if last_tick_s is None:
        return 1
    return max(0, math.floor(now_s / period_s) - math.floor(last_tick_s / period_s))


# The built-in profile of a model that the paper uses (section 6.1).
PROFILE: Final = "llama-3.1-8b-h100"

# By the values of `layout`, `boundaries` and `handover`. A baseline that balances a sum compares whole
# stages.
_PLANNERS: Final[Mapping[str, Planner]] = {PLANNED: exact, CHAIN: chain, ONE_STAGE: no_pipeline}
_SPLITS: Final[Mapping[str, tuple[Splitter, Sharing]]] = {
    QOE: (optimal_split, divided),
    QUANTITY: (quantity_split, whole),
    MEMORY: (memory_split, whole),
}
_RECEIVER_CHOICES: Final[Mapping[str, ReceiverChoice]] = {BID_ASK: by_bids, ROUND_ROBIN: round_robin}


class Cascade(Parameters):
    """Earliest stage at arrival, bid-ask at a boundary and between overloaded peers, stages by the planner.

    Choices that the paper leaves open:

    - `profile`: source of the QoE model, step times and KV size of a token, unless `model` is given. If
      instances have been measured, the means of theirs are used: section 4.1's fit of samples, or a model
      derived from their step times.
    - `penalty`: the cost of unequal lengths. It affects whether a stage can keep up, and Eq. (1), which has
      no term for it, only with `plan_penalty`.
    - `history`: (input, output) lengths of requests that arrived in `history_s` seconds, to plan for at the
      start ("collects request statistics"). Without a history there is one stage until a period is over.
    - `history_in_flight`: concurrent requests per instance in the history. Eq. (1) is about batches; 64 is a
      medium batch, and the plan depends on it little.
    - `replan_s`: the planning interval, and the period whose requests are planned for ("collects request
      statistics over the period ... and generates pipeline settings for the next period"). A minute is
      several times the life of a request.
    - `plan_requests`: minimum mean number of arrivals per instance in a period: the five of section 4.3, for
      the same reason. With fewer, each one shifts the distribution.
    - `least_plan_gain`: minimum relative improvement of a plan, by Eq. (1), over the current layout, or over
      one stage if there is none. A twentieth, because each change moves requests. Under light load D_0, which
      no layout changes, dominates: no plan gains a twentieth, and the system is ordinary multi-instance
      scheduling, like the paper's (section 6.2).
    - `most_work`: maximum work that a plan may assign to an instance, relative to its capacity
      (`stage_work`); 0: no limit, as in the paper. 1.0 leaves no margin: with more work an instance
      certainly falls behind.
    - `refine_s`, `smoothing`: section 4.3's interval and moving average.
    - `outlier`: an instance is overloaded above this multiple of its stage's mean demand ("25% above").
    - `bandwidth_bytes_per_s`: bandwidth of a transfer, for the cost of cuts: the testbed's 400 Gbit/s
      (section 6.1).
    - Prefill runs in the stage of the prompt's length ("performs prefill and decoding locally").
    - Within a stage, an arrival goes to the instance with the least demand, as a handover does.
    """

    needs = (Fact.PROFILE, Fact.PENALTY)
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
        **parameters: Value,
    ) -> None:
        super().__init__(**parameters)
        self.choose_receiver = _RECEIVER_CHOICES[self.handover]
        self.split, self.share = _SPLITS[self.boundaries]
        profile = profile if profile is not None else load_profile(PROFILE)
        self.history = Traffic.of_history(history, history_s)
        self.lengths_period_s = self.replan_s if math.isfinite(self.replan_s) else None
        self.nominal = StepModel.of_profile(profile)
        self.least_demand = LeastDemand()
        self.rooms = RoomOfInstances()
        self.pull = pulling(profile, self.pulls)
        self.planning = Planning(
            planner=_PLANNERS[self.layout],
            profile=profile,
            model=model if model is not None else QoeModel.of_profile(profile),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            max_length=self.max_length,
            penalty=penalty,
            weighs_penalty=self.plan_penalty,
            most_work=self.most_work if self.most_work > 0.0 else math.inf,
            least_requests=self.plan_requests,
            least_gain=self.least_plan_gain,
            # The baselines' layouts are used even if they are worse.
            adopts_any_first=self.layout != PLANNED,
        )

    # ---- section 3.2

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place in the earliest stage that covers the length; if it has no active instance, in the nearest
        one, longer ones first. With `overflow`, a stage whose batches are full passes it on: a sender opens
        three transfers at a time, and each waits for a step of the sender's batch, so beyond some load a
        stage fills with requests that have outgrown it while the next ones are nearly empty.

        Without stages, or if no stage has an active instance, the whole cluster is one stage.
        """
        stages = view.stages
        chosen: InstanceView | None = None
        if stages:
            at = earliest_stage(stages, arrival.prompt_tokens + arrival.output_tokens)
            for number in nearest_first(len(stages), at):
                chosen = self._dispatch(view, stages[number], arrival)
                if chosen is not None:
                    break
            if self.overflow and chosen is not None and not has_slot(chosen):
                later = (self._dispatch(view, stage, arrival) for stage in stages[at + 1 :])
                chosen = next((i for i in later if i is not None and has_slot(i)), chosen)
        if chosen is None:
            chosen = self._dispatch(view, None, arrival)
        if chosen is None:
            return Refuse("no active instance")
        return self.pull(view, arrival, Place(chosen.instance_id))

    def _dispatch(self, view: ClusterView, stage: Stage | None, arrival: Arrival) -> InstanceView | None:
        """Return the instance of the stage (None: of the cluster) for the arrival; None: it has no active
        one."""
        by_cache = self.cache_aware and arrival.cached
        if self.handover != ROUND_ROBIN and not by_cache:
            if stage is None:
                return self.least_demand.of_all(view, arrival.excluded)
            return self.least_demand.of_stage(view, stage, arrival.excluded)
        active = view.placeable() if stage is None else active_in(view, stage)
        instances = [i for i in active if i.instance_id not in arrival.excluded]
        if not instances:
            return None
        if self.handover == ROUND_ROBIN:
            return instances[arrival.seq % len(instances)]
        held = credit(arrival, self.cache_aware, self.nominal)
        return min(instances, key=lambda i: (demand_share(i, held(i)), i.load, i.instance_id))

    # ---- section 4.4, inter-stage

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over by bid-ask to the stage that covers the length now.

        "Migration is skipped if no idle cache is available" (section 5); the next refinement tries again.
        """
        at = stage_of(view.stages, request.instance_id)
        if at is None:
            return ()
        return self._handovers(view).crossed(view.stages, at, request)

    # ---- tick

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Update the stages (members, plan, boundaries), return misplaced prompts, hand over outgrown
        requests, and rebalance within stages."""
        stages = self._stages(view, now)
        actions: list[Action] = [SetStages(stages)] if stages != view.stages else []
        # By the current stages, which placements use until the new ones are set.
        actions += misplaced(view)
        handovers = self._handovers(view)
        if periods_elapsed(self.refine_s, view.last_tick_s, now):
            actions += handovers.outgrown(stages)
        if self.rebalance:
            for stage in stages or (None,):
                actions += handovers.rebalance(stage, self.outlier)
        return actions

    def _handovers(self, view: ClusterView) -> Handovers:
        return Handovers(view, self.rooms, self.choose_receiver)

    def _stages(self, view: ClusterView, now: float) -> tuple[Stage, ...]:
        members = _members(view)
        stages = view.stages
        if not stages and self.history.requests:
            return self.planning.first(members, self.history, self.history_in_flight)
        if stages:
            demand = {i.instance_id: demand_tokens(i) for i in members}
            stages = repaired(stages, demand.keys(), demand)
        if view.lengths is not None and periods_elapsed(self.replan_s, view.last_tick_s, now):
            planned = self.planning.replan(members, stages, view.lengths)
            if planned is not None:
                return planned
        refinements = periods_elapsed(self.refine_s, view.last_tick_s, now)
        if refinements and len(stages) > 1:
            model, _ = self.planning.models(members)
            # After a late tick, apply the n missed steps of the moving average at once.
            smoothing = 1.0 - (1.0 - self.smoothing) ** refinements
            refinement = Refinement(model, self.split, smoothing, share=self.share)
            return refinement.refine(stages, _lengths(members))
        return stages


def _members(view: ClusterView) -> list[InstanceView]:
    """Return the instances that stages consist of: not draining ones, but suspect ones, which may recover."""
    return [i for i in view.instances.values() if i.state is not InstanceState.DRAINING]


def _lengths(members: Sequence[InstanceView]) -> Mapping[str, Lengths]:
    tables = {i.instance_id: table_of(i.requests) for i in members}
    return {name: (table.prompt_tokens, table.context_tokens) for name, table in tables.items()}
