"""The policies that are compared, each configured as by `tailrace compare` (`simulator.setups`).

There is one exception, in favour of ARES: it has its prefill pool only in its own scenario. On the others,
whose prompts are long, a quarter of the instances would be far too few for all prefills.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from experiments.scenarios import Scenario
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
# Common policies that no paper claims.
OTHERS: Final = ("least_loaded", "tailrace.policy.cascade.llumnix:Llumnix")
ALL: Final = (*PAPERS, OURS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy and the cluster to simulate it on."""

    spec: ClusterSpec
    policy: Policy
    intra: IntraPolicy


def prepare(name: str, scenario: Scenario, mean_output_tokens: float) -> Contestant:
    """Return the policy `name` for this scenario; ARES's prediction error scales with
    `mean_output_tokens`."""
    setup = setup_for(name)
    if name == "ares" and scenario.paper != "ares":
        setup = replace(setup, prefill_share=None)
    profile, penalty = load_profile(scenario.profile), load_length_penalty(scenario.penalty)
    spec = setup.apply(ClusterSpec.uniform(scenario.instances, profile, penalty=penalty), mean_output_tokens)
    ttft_s, tpot_s = scenario.strictest_slo()
    deployment = Deployment(Slo(ttft_s, tpot_s), profile, penalty)
    return Contestant(spec, setup.policy(deployment), setup.intra(deployment.slo))
