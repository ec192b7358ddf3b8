"""The policies that are compared, each set up as `tailrace compare` does (`simulator.setups`).

One thing differs, in favour of ARES: it has its prefill pool only on its own ground. On the others, with
their long prompts, a quarter of the instances for all prefills would be its undoing; it is not about that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from benchmarks.grounds import Ground
from simulator.cluster import ClusterSpec
from simulator.setups import setup_for
from tailrace.intra.base import IntraPolicy
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tailrace.slo import Slo

PAPERS: Final = ("pascal", "ares", "arrow", "cascade")
OURS: Final = "tailrace"
# Usual ones that no paper claims.
OTHERS: Final = ("least_loaded", "llumnix")
ALL: Final = (*PAPERS, OURS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy ready to be simulated on a ground."""

    spec: ClusterSpec
    policy: Policy
    intra: IntraPolicy


def prepare(name: str, ground: Ground, mean_output_tokens: float) -> Contestant:
    """The policy `name` on this ground; `mean_output_tokens`: what ARES's error scales with."""
    setup = setup_for(name)
    if name == "ares" and ground.paper != "ares":
        setup = replace(setup, prefill_share=None)
    profile, penalty = load_profile(ground.profile), load_length_penalty(ground.penalty)
    spec = setup.apply(ClusterSpec.uniform(ground.instances, profile, penalty=penalty), mean_output_tokens)
    ttft_s, tpot_s = ground.strictest()
    deployment = Deployment(Slo(ttft_s, tpot_s), profile, penalty)
    return Contestant(spec, setup.policy(deployment), setup.intra(deployment.slo))
