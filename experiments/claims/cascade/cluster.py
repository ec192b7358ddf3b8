"""CascadeInfer's testbed (section 6.1), the same for every row.

- 16 instances of Llama-3.2-3B on H20 (the model of sections 6.4 and 6.5), batches of at most 1,024, FCFS
  inside. Links: 400 Gbit/s. A step takes up to 8,192 tokens, vLLM's default where its default batch is 1,024;
  prompts are then hardly ever split, so they come before decodes ("all systems prioritize prefilling over
  decoding", section 6.3).
- ShareGPT, first turns, as in the papers cited ("following the standard practice in prior work").
- Unequal lengths slow the whole decode step down as in figure 2, whose caption says "decoding forward pass".
  `MEASURED` is the alternative, from published kernel measurements of others.
- Rates are given on the figures' axes only. The unit, a load of 1, is what the cluster could serve with full
  batches if unequal lengths cost nothing; operating.py determines the loads that are judged.
- The pipeline is planned initially from the lengths of other requests of the same workload ("historical
  workload statistics"), and replanned every minute from that minute's requests by the policy's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from simulator.cluster import ClusterSpec, LinkSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.workloads.generators import GENERATORS
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.policy.base import Policy
from tailrace.policy.cascade.llumnix import Llumnix
from tailrace.policy.registry import choose
from tailrace.policy.round_robin import RoundRobin
from tailrace.profiles import Profile, load_profile

PROFILE: Final = "llama-3.2-3b-h20"
INSTANCES: Final = 16
BATCH: Final = 1_024
STEP_TOKENS: Final = 8_192
LINK_BYTES_PER_S: Final = 50e9
FIGURE_2: Final = "cascadeinfer-figure-2-step"
PENALTY_INPUT: Final = "figure 2's cost of unequal lengths"
MEASURED: Final = "measured-rtx-pro-6000"
# Requests from which the plan is made; no run uses this seed.
HISTORY_SEED: Final = 0
HISTORY: Final = 4_000
# QoE is not evaluated: with a pace so slow that no token is late, it costs no time.
_IRRELEVANT_PACE_S: Final = 1e3

LLUMNIX: Final = "tailrace.policy.cascade.llumnix:Llumnix"
# CascadeInfer and its ablations.
FULL: Final = "cascade"
CHAIN: Final = "cascade layout=chain"
ONE_STAGE: Final = "cascade layout=one_stage"
QUANTITY: Final = "cascade boundaries=quantity"
MEMORY: Final = "cascade boundaries=memory"
INTER_STAGE_ONLY: Final = "cascade rebalance=false"
IN_TURN: Final = "cascade handover=round_robin rebalance=false"
CASCADES: Final = (FULL, CHAIN, ONE_STAGE, QUANTITY, MEMORY, INTER_STAGE_ONLY, IN_TURN)


def history() -> list[tuple[int, int]]:
    """Return the (input, output) lengths from which to plan."""
    return [
        (r.prompt_tokens, r.output_tokens)
        for r in GENERATORS["sharegpt"].requests(HISTORY, 1.0, HISTORY_SEED)
    ]


def saturation_per_s(profile: Profile, lengths: Sequence[tuple[int, int]]) -> float:
    """Return the rate, in requests per second, that the cluster serves with full batches if unequal lengths
    cost nothing.

    A request costs an instance its prefill, and its share of as many steps as it has output tokens.
    """
    rows = np.array(lengths, dtype=np.float64)
    prompt, output = rows[:, 0], rows[:, 1]
    # Mean context over all steps of all requests.
    context = float((prompt * output + output**2 / 2).sum() / output.sum())
    step_ms = profile.decode.base_ms + profile.decode.ms(BATCH, round(BATCH * context))
    prefill = profile.prefill
    prefill_ms = float((prefill.ms_per_token * prompt + prefill.ms_per_token_squared * prompt**2).mean())
    return INSTANCES * 1e3 / (prefill_ms + float(output.mean()) * step_ms / BATCH)


def requests(profile: Profile, load: float, seconds: float, seed: int) -> list[SimRequest]:
    """Generate Poisson arrivals for some seconds at a load relative to `saturation_per_s`; seeds start at
    1."""
    rate_per_s = load * saturation_per_s(profile, history())
    return GENERATORS["sharegpt"].requests(round(rate_per_s * seconds), rate_per_s, seed)


def cluster(profile: Profile, policy: str, penalty: str) -> ClusterSpec:
    """Return the testbed, set up for a policy."""
    limits = {
        "max_num_seqs": BATCH,
        "chunk_budget_tokens": STEP_TOKENS,
        "penalty": load_length_penalty(penalty),
    }
    spec = ClusterSpec.uniform(INSTANCES, profile, **limits)
    spec = replace(spec, link=LinkSpec(bytes_per_s=LINK_BYTES_PER_S), tpot_target_s=_IRRELEVANT_PACE_S)
    return setup_for(policy).apply(spec)


def policy_for(name: str, profile: Profile, penalty: str, load: float) -> Policy:
    """Create round robin (vLLM), LLUMNIX, or one of CASCADES. Raise UnknownPolicyError.

    CascadeInfer is given the rate of its history and the cost of unequal lengths, which determine whether a
    stage keeps up, as the statistics of a period do later on.
    """
    if name == "round_robin":
        return RoundRobin()
    if name == LLUMNIX:
        return Llumnix()
    lengths = history()
    choice = choose(name)
    return choice.policy(
        **choice.parameters,
        profile=profile,
        penalty=load_length_penalty(penalty),
        history=lengths,
        history_s=HISTORY / (load * saturation_per_s(profile, lengths)),
        bandwidth_bytes_per_s=LINK_BYTES_PER_S,
    )


def llama_on_h20() -> Profile:
    """Return the step times of the model."""
    return load_profile(PROFILE)
