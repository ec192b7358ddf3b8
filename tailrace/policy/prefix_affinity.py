"""Overlap less load: how the routers of NVIDIA Dynamo and llm-d place by prefix."""

from __future__ import annotations

from dataclasses import replace

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.perf.steps import StepModel
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, candidates, held_there
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter
from tailrace.policy.pulling import PULLS, pulling
from tailrace.profiles import Profile


class PrefixAffinity(Policy):
    """The least `overlap_weight` * tokens to prefill + active tokens.

    That is how the KV router of NVIDIA Dynamo chooses ("Router Design" in its documentation: potential new
    prefill blocks, weighed, and potential active blocks) at its default temperature of 0. Tokens to prefill
    are those queued there and those of the arrival that the instance does not hold; active ones, those in
    use there and all of the arrival's. The scorers of llm-d weigh the same: the share of the prompt that is
    held against the queue and the KV in use. What is held in host memory counts less what it takes to load.
    """

    needs = (Fact.PROFILE,)
    parameters = (
        Parameter(
            "overlap_weight",
            float,
            1.0,
            "weight of a token to prefill relative to a token of KV in use",
            source="Dynamo's kv_overlap_score_weight",
            minimum=0.0,
        ),
        replace(PULLS, source="false: Dynamo's router; true: ours"),
    )
    summary = (
        "each arrival where most of its prefix is cached, minus load, as in the routers of Dynamo and llm-d"
    )

    def __init__(
        self, *, overlap_weight: float = 1.0, pulls: bool = False, profile: Profile | None = None
    ) -> None:
        self.overlap_weight = overlap_weight
        self.nominal = StepModel.of_profile(profile)
        self.pull = pulling(profile, pulls)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """The least cost; then the fewest requests; the first of equals."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        weight, tokens, nominal = self.overlap_weight, arrival.context_tokens, self.nominal
        chosen = min(
            instances,
            key=lambda i: (
                weight * (i.prefill_backlog_tokens + tokens - held_there(arrival, i, nominal))
                + i.kv_used_tokens
                + tokens,
                i.load,
            ),
        )
        return self.pull(view, arrival, Place(chosen.instance_id))
