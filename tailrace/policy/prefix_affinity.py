"""Prefix affinity: place by cached prefix and load, like the routers of NVIDIA Dynamo and llm-d."""

from __future__ import annotations

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.perf.steps import StepModel
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, candidates, held_tokens_on
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.policy.pulling import pulling, pulls_parameter
from tailrace.profiles import Profile


class PrefixAffinity(Policy):
    """Minimize `overlap_weight` * tokens to prefill + active tokens.

    This is the cost function of NVIDIA Dynamo's KV router ("Router Design" in its documentation: weighted
    potential new prefill blocks plus potential active blocks) at its default temperature of 0. Tokens to
    prefill are those queued on the instance and those of the arrival that it has not cached; active tokens
    are its KV in use and all tokens of the arrival. The scorers of llm-d weigh the same quantities: the
    cached share of the prompt against the queue and the KV in use. Tokens cached in host memory count less
    the cost of loading them.
    """

    needs = (Fact.PROFILE,)
    overlap_weight: float = parameter(
        1.0,
        "weight of a token to prefill relative to a token of KV in use",
        source="Dynamo's kv_overlap_score_weight",
        minimum=0.0,
    )
    pulls: bool = pulls_parameter("false: Dynamo's router; true: ours")
    summary = (
        "each arrival where most of its prefix is cached, minus load, as in the routers of Dynamo and llm-d"
    )

    def __init__(self, *, profile: Profile | None = None, **parameters: Value) -> None:
        super().__init__(**parameters)
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, self.pulls)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the instance with the least cost, then the fewest requests; the first of equals."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        weight, tokens, nominal = self.overlap_weight, arrival.context_tokens, self.nominal
        chosen = min(
            instances,
            key=lambda i: (
                weight * (i.prefill_backlog_tokens + tokens - held_tokens_on(arrival, i, nominal))
                + i.kv_used_tokens
                + tokens,
                i.load,
            ),
        )
        return self.pull(view, arrival, Place(chosen.instance_id))
