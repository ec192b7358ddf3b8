"""The policies that are compared, each with what its paper gives it: order inside the instance, pools at the
start, what a full target does, predictions. Every one gets the profile and the SLOs if it takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.grounds import Ground
from simulator.cluster import ClusterSpec, WhenFull
from simulator.predictors import NoisyPredictor
from tailrace.cluster import Pool
from tailrace.intra.base import IntraPolicy
from tailrace.intra.fcfs import Fcfs
from tailrace.intra.registry import intra_for_policy, make_intra
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.policy.ares.future_load import FutureLoad
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.base import Policy
from tailrace.policy.cascade.policy import Cascade
from tailrace.policy.registry import load
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile

PAPERS = ("pascal", "ares", "arrow", "cascade")
OURS = "tailrace"
# The usual ones that no paper claims.
OTHERS = ("least_loaded", "llumnix")
ALL = (*PAPERS, OURS, *OTHERS)

_WHEN_FULL = {"pascal": WhenFull.HOST, "cascade": WhenFull.REFUSE}
_PREDICTS = ("ares", "tailrace")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy ready to be simulated on a ground."""

    spec: ClusterSpec
    policy: Policy
    intra: IntraPolicy


def prepare(name: str, ground: Ground) -> Contestant:
    """The policy `name` on this ground."""
    profile, penalty = load_profile(ground.profile), load_length_penalty(ground.penalty)
    spec = ClusterSpec.uniform(ground.instances, profile, penalty=penalty)
    full = _WHEN_FULL.get(name, WhenFull.WAIT)
    spec = replace(spec, migration=replace(spec.migration, when_full=full))
    pools = _pools(name, ground)
    if pools is not None:
        prefill, decode = pools
        spec = spec.with_pools([Pool.PREFILL] * prefill + [Pool.DECODE] * decode)
    if name in _PREDICTS and ground.paper == "ares":
        # Only there is there a predictor whose error is known.
        spec = replace(spec, predictor=NoisyPredictor(), future_load=FutureLoad())
    makers: dict[str, Callable[[], Policy]] = {
        "arrow": lambda: Arrow(*_slos(ground), profile),
        "cascade": lambda: Cascade(profile),
        "tailrace": lambda: Tailrace(profile, penalty),
    }
    policy = makers.get(name, lambda: load(name))()
    return Contestant(spec, policy, make_intra(intra_for_policy(name)) or Fcfs())


def _pools(name: str, ground: Ground) -> tuple[int, int] | None:
    if name == "ares":
        return ground.ares_pools
    half = ground.instances // 2
    return (half, ground.instances - half) if name == "arrow" else None


def _slos(ground: Ground) -> tuple[float, float]:
    """The strictest there are: a policy has one pair for all requests."""
    if not ground.slos:
        return 2.0, 0.15
    return min(slo.ttft_s for slo in ground.slos), min(slo.tpot_s for slo in ground.slos)
