"""C13: how evenly bid-ask spreads the work inside each stage (section 6.5, figure 16).

Judged at the heavy load of C1 to C11 (operating.py), with stage boundaries that overload no stage: an
overloaded stage is even because all of it is full. Only tokens of requests that arrived after the warm-up
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Final

import numpy as np

from experiments.claims.base import QUICK, WHOLE, Claim, Effort, Experiment, Figures, Finding, Run
from experiments.claims.cascade.cluster import (
    FIGURE_2,
    FULL,
    HISTORY,
    IN_TURN,
    INSTANCES,
    INTER_STAGE_ONLY,
    LINK_BYTES_PER_S,
    PENALTY_INPUT,
    cluster,
    history,
    llama_on_h20,
    requests,
    saturation_per_s,
)
from experiments.claims.cascade.operating import HEAVY
from experiments.claims.cascade.serving import MEASURED_UNTIL
from experiments.claims.verdicts import format_estimate, judge_effect, means_of, number, spreads_of, weakest
from simulator.estimate import Estimate, estimate
from simulator.records import MigrationOutcome, RequestRecord, SimResult
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.cluster import Stage
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.qoe_model import QoeModel
from tailrace.policy.cascade.planner import Costs
from tailrace.policy.cascade.planning import Engines, stage_work
from tailrace.policy.cascade.workload import Slowdown, Traffic, bucket_edges
from tailrace.policy.registry import choose
from tailrace.profiles import Profile

C13 = Claim(
    "C13",
    "CascadeInfer",
    "Fig. 16",
    "variation of output tokens between instances of a stage: full bid-ask vs inter-stage only / round robin",
    "-40% / -47%",
    PENALTY_INPUT,
)
STAGES: Final = 4
_NAME: Final = "cascade-balance"
_MAX_LENGTH: Final = 131_072
# Requests of the history in flight per instance: the policy's default.
_IN_FLIGHT: Final = 64.0
SECONDS: Final = 90.0
# Share of the arrivals that is not counted. Requests last seconds if stages keep up.
_WARM_UP: Final = 1 / 3
_QUICK_SECONDS: Final = 60.0
SEEDS: Final = (1, 2, 3, 4, 5)


def balance(effort: Effort = WHOLE) -> Experiment:
    """Return the experiment: four stages of four instances each, whose members never change."""
    seconds = _QUICK_SECONDS if effort is QUICK else SECONDS
    seeds = effort.seeds(SEEDS)
    runs = tuple(
        Run(_run_name(policy, seed), spread, (policy, seconds, seed), 0.11 * seconds)
        for policy in (FULL, INTER_STAGE_ONLY, IN_TURN)
        for seed in seeds
    )
    return Experiment(_NAME, (C13,), runs, partial(judge, seeds))


def _run_name(policy: str, seed: int) -> str:
    return f"{_NAME}/{policy}/{seed}"


def four_stages(profile: Profile, load: float) -> tuple[Stage, ...]:
    """Return the boundaries of four stages of four with the best Eq. (1), among those with which all keep
    up."""
    edges = bucket_edges(_MAX_LENGTH)
    lengths = history()
    traffic = Traffic.of_history(lengths, HISTORY / (load * saturation_per_s(profile, lengths)))
    workload = traffic.in_flight(edges, _IN_FLIGHT * INSTANCES)
    penalty = load_length_penalty(FIGURE_2)
    assert penalty is not None
    work = stage_work(
        traffic, edges, Engines.of((), profile), Slowdown.of(penalty, workload, round(_IN_FLIGHT))
    )
    transfer_s = profile.kv_bytes_per_token / LINK_BYTES_PER_S
    costs = Costs(workload, QoeModel.of_profile(profile), transfer_s, work=work)
    counts = [INSTANCES // STAGES] * STAGES
    plans = (
        costs.plan((0, *inner, costs.buckets), counts)
        for inner in combinations(range(1, costs.buckets), STAGES - 1)
    )
    best = min(plans, key=lambda plan: (max(1.0, costs.load(plan)), plan.cost))
    return best.stages([f"i{n:03d}" for n in range(INSTANCES)])


def spread(policy: str, seconds: float, seed: int) -> Figures:
    """Measure the coefficient of variation of output tokens between the instances of each stage."""
    profile, load = llama_on_h20(), HEAVY[FIGURE_2]
    stages = four_stages(profile, load)
    spec = replace(cluster(profile, policy, FIGURE_2), stages=stages)
    choice = choose(policy)
    fixed = choice.policy(
        **choice.parameters,
        profile=profile,
        penalty=load_length_penalty(FIGURE_2),
        bandwidth_bytes_per_s=LINK_BYTES_PER_S,
        replan_s=float("inf"),
    )
    arriving = requests(profile, load, seconds, seed)
    result = simulate(spec, arriving, fixed, setup_for(policy).intra())
    begin_s, until_s = (
        arriving[int(share * len(arriving))].arrival_s for share in (_WARM_UP, MEASURED_UNTIL)
    )
    counted = [r for r in result.requests if begin_s <= r.arrival_s < until_s]
    tokens = tokens_by_instance(result, counted)
    made = [[tokens[name] for name in stage.instance_ids] for stage in stages]
    variation = [float(np.std(part) / np.mean(part)) if sum(part) else 0.0 for part in made]
    waits = [r.ttft_s for r in counted if r.ttft_s is not None]
    return {
        "variation": variation,
        "mean_variation": float(np.mean(variation)),
        "tokens": [float(sum(part)) for part in made],
        "boundaries": [float(stage.hi) for stage in stages[:-1]],
        "ttft_mean_s": float(np.mean(waits)),
    }


def tokens_by_instance(result: SimResult, counted: Sequence[RequestRecord]) -> Counter[str]:
    """Return the output tokens of these requests by instance; those generated during a migration count for
    its target."""
    moves: dict[str, list[tuple[str, int]]] = {}
    for move in result.migrations:
        if move.outcome is MigrationOutcome.COMMITTED:
            moves.setdefault(move.request_id, []).append((move.target_id, move.context_tokens))
    made: Counter[str] = Counter()
    for record in counted:
        if not record.placements:
            continue
        moved = moves.get(record.request_id, [])
        # A prompt that was returned generated no token where it was first placed.
        began = record.placements[-1 - len(moved)].instance_id
        places = [(began, record.prompt_tokens), *moved]
        ends = [*(start for _, start in places[1:]), record.prompt_tokens + record.output_tokens]
        for (name, start), end in zip(places, ends, strict=True):
            made[name] += max(0, end - start)
    return made


def judge(seeds: Sequence[int], figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge C13 by the mean over the stages, with changes on the same requests."""
    each = {
        policy: [number(figures[_run_name(policy, seed)], "mean_variation") for seed in seeds]
        for policy in (FULL, INTER_STAGE_ONLY, IN_TURN)
    }
    found = {policy: estimate(values) for policy, values in each.items()}
    against = [_change(each[FULL], each[other]) for other in (INTER_STAGE_ONLY, IN_TURN)]
    full, inter, turns = (found[policy].mean for policy in (FULL, INTER_STAGE_ONLY, IN_TURN))
    ordered = all(a <= b for a, b in pairwise((full, inter, turns)))
    significant = all(change.half_width is None or abs(change.mean) > change.half_width for change in against)
    estimates = {
        "full": found[FULL],
        "inter_stage_only": found[INTER_STAGE_ONLY],
        "round_robin": found[IN_TURN],
    }
    estimates |= {"against_inter_stage_only": against[0], "against_round_robin": against[1]}
    return (
        Finding(
            C13.claim_id,
            f"{format_estimate(against[0], '+.0%')} / {format_estimate(against[1], '+.0%')} "
            f"({full:.3f}, {inter:.3f}, {turns:.3f})",
            weakest([judge_effect(against[0].mean, -0.40), judge_effect(against[1].mean, -0.47)]),
            ("ordered as in the figure" if ordered else "not ordered as in the figure")
            + ("" if significant else "; the seeds do not distinguish all of them"),
            means_of(estimates),
            spreads_of(estimates),
        ),
    )


def _change(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    return estimate([mine / other - 1.0 for mine, other in zip(ours, theirs, strict=True)])
