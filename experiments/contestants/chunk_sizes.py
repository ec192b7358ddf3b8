"""Chunk sizes by instance in place of pools, after TaiChi (arXiv 2508.01989)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from simulator.cluster import ClusterSpec
from tailrace.actions import Action, Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool, RequestView
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.arrow.load import running_tokens
from tailrace.policy.arrow.policy import PROFILE
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, Ledger
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value
from tailrace.profiles import Profile, load_profile

# Prompt tokens that a step computes at most, beside its decodes. The paper sets these two and the share of
# either kind by hand; vLLM's default budget, and an eighth of it.
LARGE: Final = 2_048
SMALL: Final = 256


def with_chunks(spec: ClusterSpec) -> ClusterSpec:
    """Return the cluster, in whose prefill pool steps compute large chunks, and elsewhere small ones."""
    return replace(
        spec,
        instances=tuple(
            replace(i, chunk_budget_tokens=LARGE if i.pool is Pool.PREFILL else SMALL) for i in spec.instances
        ),
    )


class ChunkSizes(Policy):
    """Instances that prefill fast and instances that decode undisturbed, both of which do both.

    The paper's: prefill-heavy instances have large chunks (fast prefill, decodes that suffer from it),
    decode-heavy ones small chunks (slow prefill, decodes that do not); the share of either and both sizes are
    its three sliders. Latency is shifted to requests that have slack: a prompt that meets the TTFT SLO on a
    slow instance need not take a fast one's time, and a request within its TPOT SLO may decode where it
    suffers.

    Ours: a prompt goes to the decode-heavy instance with the least predicted TTFT if that meets the SLO, else
    to the instance with the least of all. When it is prefilled, it stays, unless it is on a prefill-heavy
    instance whose tokens come later than the TPOT SLO allows: then it moves to the decode-heavy instance with
    the fewest running tokens that has room. The prefill-heavy instances are those of the prefill pool, a half
    (`with_chunks`).
    """

    needs = (Fact.TTFT_SLO, Fact.TPOT_SLO, Fact.PROFILE)
    prefill_share = 0.5
    batch_order = "decode_first"
    summary = "large chunks on some instances and small ones on others, after TaiChi"

    def __init__(
        self,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.15,
        profile: Profile | None = None,
        **parameters: Value,
    ) -> None:
        super().__init__(**parameters)
        profile = profile if profile is not None else load_profile(PROFILE)
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s
        self._large = TtftPredictor.of_profile(profile, LARGE)
        self._small = TtftPredictor.of_profile(profile, SMALL)

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place where the TTFT SLO is met at the least cost to others."""
        pools = Pools.of(view, arrival.excluded)
        slow, others = pools.decode, (*pools.prefill, *pools.unpooled)
        tokens = arrival.prompt_tokens + arrival.output_tokens
        if slow:
            best = min(slow, key=lambda i: (self._ttft_s(i, tokens), i.load, i.instance_id))
            if self._ttft_s(best, tokens) <= self.ttft_slo_s:
                return Place(best.instance_id)
        if not (candidates := (*slow, *others)):
            return NO_INSTANCE
        return Place(
            min(candidates, key=lambda i: (self._ttft_s(i, tokens), i.load, i.instance_id)).instance_id
        )

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Move to a decode-heavy instance if this one's tokens come too late."""
        source = view.instances.get(request.instance_id)
        if source is None or source.pool is not Pool.PREFILL or source.token_interval_s <= self.tpot_slo_s:
            return ()
        ledger = Ledger(view.instances, transfers_in=None, transfers_out=None)
        if not ledger.may_send(source, request):
            return ()
        targets = [i for i in Pools.of(view).decode if ledger.may_receive(i, request)]
        if not targets:
            return ()
        target = min(targets, key=lambda i: (running_tokens(i), i.instance_id))
        return (ledger.reserve(request, target, "prefill done"),)

    def _ttft_s(self, instance: InstanceView, tokens: int) -> float:
        """Return the predicted seconds until a prompt is prefilled there: the prompts ahead of it, and it."""
        predictor = self._large if instance.pool is Pool.PREFILL else self._small
        ahead_s = predictor.backlog_s(instance.prefill_backlog_tokens, instance.waiting)
        return ahead_s + predictor.prefill_s(tokens)
