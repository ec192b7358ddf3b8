"""Plan stages: at the start for a history, then for the requests of each period (section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.cluster import InstanceView, Stage
from tailrace.lengths import LengthStatistics
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.qoe_model import Floats, QoeModel
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.planner import Costs, Planner
from tailrace.policy.cascade.workload import Ints, Slowdown, Traffic, bucket_edges, bucket_of, with_cuts
from tailrace.profiles import Profile

# The work of a stage: whether its instances can keep up with its prefill and decoding.
#
# Eq. (1) models the latencies of batches and has no limit on throughput. A step with B requests and K tokens
# takes T = d0 + d1 B + d2 K and makes B tokens. At best an instance's KV or batch is full, so that a token of
# a request with m tokens of context takes at least d0 max(m / capacity, 1 / slots) + d1 + d2 m seconds of an
# instance. Adding prefill gives the work of a stage, in instance-seconds per second. A stage of k instances
# with more work than k falls behind, whatever its batches are.


@dataclass(frozen=True, slots=True)
class Engines:
    """The mean of a cluster's instances."""

    # Seconds of a prefill: per token, and per token squared.
    prompt_s: tuple[float, float]
    # Seconds of a decode step: base, per request, per KV token.
    step_s: tuple[float, float, float]
    kv_capacity_tokens: float
    # Maximum requests in a batch; infinite: unknown.
    slots: float

    @staticmethod
    def of(members: Sequence[InstanceView], profile: Profile) -> Engines:
        """Average the measured instances; if none was measured, use `profile`."""
        profiles = [i.measured.profile for i in members if i.measured is not None] or [profile]
        capacities = [i.kv_capacity_tokens for i in members if i.kv_capacity_tokens]
        slots = [i.max_num_seqs for i in members if i.max_num_seqs]
        prompt = [(p.prefill.ms_per_token, p.prefill.ms_per_token_squared) for p in profiles]
        step = [(p.decode.base_ms, p.decode.ms_per_request, p.decode.ms_per_kv_token) for p in profiles]
        per_token, per_square = np.mean(prompt, axis=0) / 1e3
        base, per_request, per_kv_token = np.mean(step, axis=0) / 1e3
        return Engines(
            (float(per_token), float(per_square)),
            (float(base), float(per_request), float(per_kv_token)),
            float(np.mean(capacities)) if capacities else float(profile.kv_capacity_tokens),
            float(np.mean(slots)) if slots else float("inf"),
        )


def stage_work(traffic: Traffic, edges: Ints, engines: Engines, slowdown: Slowdown) -> Floats:
    """Return the work [buckets + 1, buckets + 1] of each stage from one edge to another, in instances.

    A prompt is prefilled in the stage of its length, and a token is made in the stage of the request's length
    at that time. Raise ValueError for traffic of unknown rate, or without output.
    """
    if not traffic.seconds:
        raise ValueError("work needs the number of seconds in which the requests arrived")
    per_s = traffic.weights / traffic.seconds
    buckets = len(edges) - 1
    per_token, per_square = engines.prompt_s
    prompts_s = per_token * traffic.inputs + per_square * traffic.inputs**2
    prefill = np.bincount(bucket_of(edges, traffic.inputs), weights=per_s * prompts_s, minlength=buckets)
    # Tokens made per second, and the sum of their contexts, by bucket of length.
    tokens_per_s = float(per_s @ traffic.outputs)
    generated = traffic.in_flight(edges, tokens_per_s).sums
    prefill_between = _between(prefill)
    tokens, contexts = _between(generated[:, 0]), _between(generated[:, 3])
    base, per_request, per_kv_token = engines.step_s
    batches = np.maximum(contexts / engines.kv_capacity_tokens, tokens / engines.slots)
    decode = base * batches + per_request * tokens + per_kv_token * slowdown.attention * contexts
    return np.asarray(prefill_between + slowdown.step * decode, dtype=np.float64)


def _between(by_bucket: Floats | Ints) -> Floats:
    """Return the sums [buckets + 1, buckets + 1] from one edge to another."""
    prefix = np.concatenate([[0.0], np.cumsum(by_bucket)])
    return np.asarray(prefix[None, :] - prefix[:, None], dtype=np.float64)


# Maximum batch size for which the cost of unequal lengths is computed.
_BATCH_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Planning:
    """Plan stages by Eq. (1), subject to the capacity of the stages.

    - `profile`, `model`: of instances that have not been measured.
    - `penalty`: the cost of unequal lengths; None: unknown. It always affects a stage's capacity, but Eq. (1)
      only with `weighs_penalty`.
    - `most_work`: maximum work that a plan may assign to an instance, relative to its capacity; infinite: no
      limit, as in the paper.
    - `least_requests`: minimum arrivals per instance in a period for planning from it.
    - `least_gain`: minimum relative improvement of a plan over the current layout, by Eq. (1).
    - `adopts_any_first`: adopt the first plan even without an improvement.
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
    adopts_any_first: bool

    def first(self, members: Sequence[InstanceView], history: Traffic, in_flight: float) -> tuple[Stage, ...]:
        """Plan for a history with `in_flight` concurrent requests per instance; instances in id order."""
        if not members:
            return ()
        costs = self._costs(members, history, in_flight * len(members), ())
        return self.planner(costs, len(members)).stages(sorted(i.instance_id for i in members))

    def replan(
        self, members: Sequence[InstanceView], stages: Sequence[Stage], statistics: LengthStatistics
    ) -> tuple[Stage, ...] | None:
        """Plan for the requests of a period; instances keep the order of their stages.

        Return None to keep the current layout (possibly no stages): if too few requests arrived, or if the
        plan gains less than `least_gain`. A plan that keeps up where the current layout is overloaded is
        adopted regardless of its gain.
        """
        names = [name for stage in stages for name in stage.instance_ids]
        if not names:
            names = sorted(i.instance_id for i in members)
        edges = bucket_edges(self.max_length)
        traffic = Traffic.of_period(statistics, edges)
        if not names or traffic is None or traffic.requests < self.least_requests * len(names):
            return None
        # Stages set by an operator need not cover all lengths; then compare with a single stage.
        complete = tiles(stages, self.max_length)
        cuts = [0, *(stage.hi for stage in stages)] if complete else [0, self.max_length]
        counts = [len(stage.instance_ids) for stage in stages] if complete else [len(names)]
        # Eq. (1) is about batches, and waiting prompts are in no batch yet.
        running = max(1.0, float(sum(i.running for i in members)))
        costs = self._costs(members, traffic, running, cuts)
        current = costs.layout(cuts, counts)
        plan = self.planner(costs, len(names))
        relieves = costs.load(current) > costs.most_work * (1.0 + 1e-9) >= costs.load(plan)
        gains = plan.cost <= (1.0 - self.least_gain) * current.cost
        is_first = self.adopts_any_first and not stages
        return plan.stages(names) if relieves or gains or is_first else None

    def models(self, members: Sequence[InstanceView]) -> tuple[QoeModel, float]:
        """Return the QoE model and the seconds to transfer a token's KV: the means of measured instances, if
        any."""
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
        # If the cluster is overloaded as a whole, the limit is the work per instance in a single stage.
        most = max(self.most_work, float(work[0, -1]) / len(members))
        return Costs(workload, model, transfer_s, weighed, work, most)
