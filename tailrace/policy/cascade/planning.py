"""Which stages there are to be: at the start from a history, then from each period (section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.cluster import InstanceView, Stage
from tailrace.lengths import LengthStatistics
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.qoe_model import QoeModel
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.planner import Costs, Planner
from tailrace.policy.cascade.slowdown import Slowdown
from tailrace.policy.cascade.stage_work import Engines, stage_work
from tailrace.policy.cascade.traffic import Traffic
from tailrace.policy.cascade.workload import bucket_edges, with_cuts
from tailrace.profiles import Profile

# Most requests of a batch that are looked at for what their unequal lengths cost.
_BATCH_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Planning:
    """Plans by Eq. (1), within what stages can do.

    - `profile`, `model`: of instances that have not been measured.
    - `penalty`: what unequal lengths cost there; None: not known. It counts for what a stage can do, and for
      Eq. (1) only with `weighs_penalty`.
    - `most_work`: of what an instance can do, how much a plan may give it; infinite: as the paper, no limit.
    - `least_gain`: share by which a plan must be better, by Eq. (1), than what there is.
    - `insists`: the first plan holds whatever it costs.
    """

    planner: Planner
    profile: Profile
    model: QoeModel
    bandwidth_bytes_per_s: float
    max_length: int
    penalty: FittedLengthPenalty | None
    weighs_penalty: bool
    most_work: float
    least_requests: float
    least_gain: float
    insists: bool

    def first(self, members: Sequence[InstanceView], history: Traffic, in_flight: float) -> tuple[Stage, ...]:
        """For a history, with `in_flight` requests on an instance at a time; instances in id order."""
        if not members:
            return ()
        costs = self._costs(members, history, in_flight * len(members), ())
        return self.planner(costs, len(members)).stages(sorted(i.instance_id for i in members))

    def anew(
        self, members: Sequence[InstanceView], stages: Sequence[Stage], statistics: LengthStatistics
    ) -> tuple[Stage, ...] | None:
        """For what came in the period; instances are kept in the order of their stages.

        None: what there is stays, be it no stages at all. Too few requests have come, or no plan is better by
        `least_gain`, and what there is does not fall behind where the plan does not.
        """
        names = [name for stage in stages for name in stage.instance_ids]
        if not names:
            names = sorted(i.instance_id for i in members)
        edges = bucket_edges(self.max_length)
        traffic = Traffic.of_period(statistics, edges)
        if not names or traffic is None or traffic.requests < self.least_requests * len(names):
            return None
        # Those that an operator has set may not be what could be planned.
        whole = tiles(stages, self.max_length)
        cuts = [0, *(stage.hi for stage in stages)] if whole else [0, self.max_length]
        counts = [len(stage.instance_ids) for stage in stages] if whole else [len(names)]
        # Who waits for its prefill is in no batch yet.
        running = max(1.0, float(sum(i.running for i in members)))
        costs = self._costs(members, traffic, running, cuts)
        present = costs.layout(cuts, counts)
        plan = self.planner(costs, len(names))
        behind = costs.load(present) > costs.most_work * (1.0 + 1e-9) >= costs.load(plan)
        gains = plan.cost <= (1.0 - self.least_gain) * present.cost
        insists = self.insists and not stages
        return plan.stages(names) if behind or gains or insists else None

    def models(self, members: Sequence[InstanceView]) -> tuple[QoeModel, float]:
        """QoE, and seconds to transfer a token's KV: of those that were measured, if any was."""
        measured = [i.measured for i in members if i.measured is not None]
        if not measured:
            return self.model, self.profile.kv_bytes_per_token / self.bandwidth_bytes_per_s
        kv_bytes = sum(m.profile.kv_bytes_per_token for m in measured) / len(measured)
        return QoeModel.mean([m.qoe for m in measured]), kv_bytes / self.bandwidth_bytes_per_s

    def _costs(
        self, members: Sequence[InstanceView], traffic: Traffic, in_flight: float, cuts: Sequence[int]
    ) -> Costs:
        edges = with_cuts(bucket_edges(self.max_length), cuts)
        workload = traffic.in_flight(edges, in_flight)
        slowdown = Slowdown()
        if self.penalty is not None:
            batch = min(_BATCH_MAX, max(2, round(in_flight / len(members))))
            slowdown = Slowdown.of(self.penalty, workload, batch)
        model, transfer_s = self.models(members)
        weighed = slowdown if self.weighs_penalty else Slowdown()
        if not traffic.seconds:
            return Costs(workload, model, transfer_s, weighed)
        work = stage_work(traffic, edges, Engines.of(members, self.profile), slowdown)
        # Beyond what the cluster can do as one stage, nobody gets more than in that.
        most = max(self.most_work, float(work[0, -1]) / len(members))
        return Costs(workload, model, transfer_s, weighed, work, most)
