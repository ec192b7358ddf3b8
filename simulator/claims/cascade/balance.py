"""C13: how evenly bid-ask spreads the work inside each stage (section 6.5, figure 16)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Final

import numpy as np

from simulator.claims.base import Claim, Experiment, Figures, Finding, Run
from simulator.claims.cascade.cluster import (
    CASCADES,
    FIGURE_2,
    INSTANCES,
    LINK_BYTES_PER_S,
    cluster,
    history,
    llama_on_h20,
    requests,
)
from simulator.claims.figures import number
from simulator.claims.verdicts import of_effect, weakest
from simulator.records import MigrationOutcome, SimResult
from simulator.run import simulate
from simulator.setups import setup_for
from tailrace.cluster import Stage
from tailrace.policy.cascade.planner import Costs
from tailrace.policy.cascade.qoe import QoeModel
from tailrace.policy.cascade.workload import Workload, bucket_edges
from tailrace.profiles import Profile

C13 = Claim(
    "C13",
    "CascadeInfer",
    "Fig. 16",
    "variation of output tokens between instances of a stage: full bid-ask vs inter-stage only / round robin",
    "-40% / -47%",
)
STAGES: Final = 4
_NAME: Final = "cascade-balance"
_FULL, _INTER, _TURNS = "cascade", "cascade_inter_stage_only", "cascade_round_robin"
_MAX_LENGTH: Final = 131_072
# Requests of the history in flight, an instance: the policy's own default.
_IN_FLIGHT: Final = 64


def balance() -> Experiment:
    """Four stages of four instances each, whose members never change."""
    runs = tuple(Run(f"{_NAME}/{policy}", spread, (policy,), 12.0) for policy in (_FULL, _INTER, _TURNS))
    return Experiment(_NAME, (C13,), runs, judge)


def four_stages(profile: Profile) -> tuple[Stage, ...]:
    """The cuts that Eq. (1) likes best of all for four stages of four."""
    edges = bucket_edges(_MAX_LENGTH)
    lengths = history()
    inputs, outputs = [row[0] for row in lengths], [row[1] for row in lengths]
    workload = Workload.of_history(edges, inputs, outputs, _IN_FLIGHT * INSTANCES)
    costs = Costs(workload, QoeModel.of_profile(profile), profile.kv_bytes_per_token / LINK_BYTES_PER_S)
    counts = [INSTANCES // STAGES] * STAGES
    plans = (
        costs.plan((0, *inner, costs.buckets), counts)
        for inner in combinations(range(1, costs.buckets), STAGES - 1)
    )
    best = min(plans, key=lambda plan: plan.cost)
    return best.stages([f"i{n:03d}" for n in range(INSTANCES)])


def spread(policy: str) -> Figures:
    """Coefficient of variation of output tokens between the instances of each stage."""
    profile = llama_on_h20()
    stages = four_stages(profile)
    spec = replace(cluster(profile, policy, FIGURE_2), stages=stages)
    fixed = CASCADES[policy](profile, bandwidth_bytes_per_s=LINK_BYTES_PER_S, replan_s=float("inf"))
    result = simulate(spec, requests(profile), fixed, setup_for(policy).intra())
    tokens = tokens_by_instance(result)
    made = [[tokens[name] for name in stage.instance_ids] for stage in stages]
    variation = [float(np.std(part) / np.mean(part)) if sum(part) else 0.0 for part in made]
    return {
        "variation": variation,
        "mean_variation": float(np.mean(variation)),
        "tokens": [float(sum(part)) for part in made],
        "boundaries": [float(stage.hi) for stage in stages[:-1]],
    }


def tokens_by_instance(result: SimResult) -> Counter[str]:
    """Output tokens that each instance made; those made during a migration count for its target."""
    moves: dict[str, list[tuple[str, int]]] = {}
    for move in result.migrations:
        if move.outcome is MigrationOutcome.COMMITTED:
            moves.setdefault(move.request_id, []).append((move.target_id, move.context_tokens))
    made: Counter[str] = Counter()
    for record in result.requests:
        if not record.placements:
            continue
        moved = moves.get(record.request_id, [])
        # A prompt that was handed back made nothing where it was first.
        began = record.placements[-1 - len(moved)].instance_id
        places = [(began, record.prompt_tokens), *moved]
        ends = [*(start for _, start in places[1:]), record.prompt_tokens + record.output_tokens]
        for (name, start), end in zip(places, ends, strict=True):
            made[name] += max(0, end - start)
    return made


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Mean over the stages."""
    full, inter, turns = (_variation(figures, policy) for policy in (_FULL, _INTER, _TURNS))
    against = (full / inter - 1.0, full / turns - 1.0)
    ordered = all(a <= b for a, b in pairwise((full, inter, turns)))
    return (
        Finding(
            C13.claim_id,
            f"{against[0]:+.0%} / {against[1]:+.0%} ({full:.3f}, {inter:.3f}, {turns:.3f})",
            weakest([of_effect(against[0], -0.40), of_effect(against[1], -0.47)]),
            "ordered as in the figure" if ordered else "not ordered as in the figure",
            {"full": full, "inter_stage_only": inter, "round_robin": turns},
        ),
    )


def _variation(figures: Mapping[str, Figures], policy: str) -> float:
    return number(figures[f"{_NAME}/{policy}"], "mean_variation")
