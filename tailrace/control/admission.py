"""Refuse a request on arrival, rather than after its wait, if its first token would arrive too late."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from tailrace.actions import Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase
from tailrace.perf.remaining import SAMPLE, mean_remaining_tokens
from tailrace.slo import Slo


@dataclass(frozen=True, slots=True)
class TtftAdmission:
    """Accept placements by their predicted TTFT. The policy has already chosen the instance.

    `within_s`: longest acceptable predicted TTFT in seconds. An instance whose prompt times are unknown
    accepts everything.
    """

    within_s: float

    @staticmethod
    def of(slo: Slo) -> TtftAdmission | None:
        """Return the admission rule of these SLOs; None if they refuse no request."""
        if slo.admit is None or slo.ttft_s is None:
            return None
        return TtftAdmission(slo.admit * slo.ttft_s)

    def evaluate(self, view: ClusterView, arrival: Arrival, placement: Placement) -> Placement:
        """Return the placement, or its refusal. A request that was admitted before is never refused."""
        if isinstance(placement, Refuse) or arrival.admitted or arrival.output_tokens:
            return placement
        instance = view.instances.get(placement.instance_id)
        if instance is None:
            return placement
        # An instance of another model cannot supply KV for the request.
        pull_from = placement.pull_from if placement.pull_from in view.instances else ""
        predicted_s = self.first_token_s(instance, arrival, pull_from)
        if predicted_s is None or predicted_s <= self.within_s:
            return placement
        first = f"in {predicted_s:.1f} s" if math.isfinite(predicted_s) else "at an unknown time"
        return Refuse(
            f"its first token would arrive {first}, and the limit is {self.within_s:g} s", final=True
        )

    def first_token_s(self, instance: InstanceView, arrival: Arrival, pull_from: str = "") -> float | None:
        """Return the seconds to the request's first token if placed on this instance; None if unknown.

        `pull_from`: the instance that its prefix is pulled from; empty: none. This is Arrow's prediction
        (section 5.3): the queued prompts plus its own, without cached tokens; or, if KV is short, the time
        until there is enough, if longer.
        """
        ttft = instance.ttft
        if ttft is None:
            if instance.measured is None:
                return None
            ttft = instance.measured.ttft
        delay_s = instance.prefill_delay_s
        if delay_s is None:
            delay_s = ttft.backlog_s(instance.prefill_backlog_tokens, instance.waiting)
        found_tokens = arrival.found_tokens(instance.instance_id, pull_from)
        own_s = ttft.prefill_s(arrival.context_tokens) - ttft.saved_s(found_tokens)
        # Cached blocks that are in use by other requests need no further KV. Which are is unknown: assume
        # all.
        needed_tokens = arrival.context_tokens - arrival.cached_tokens(instance.instance_id)
        return max(delay_s, kv_wait_s(instance, needed_tokens)) + own_s


def kv_wait_s(instance: InstanceView, tokens: int) -> float:
    """Return the seconds until an instance has KV for a prompt of `tokens`, behind the prompts that wait
    there.

    Infinite if the requests there will never free enough. KV that can be swapped out to host memory counts as
    free. Running requests free their KV as they end, on average after as many more tokens as
    `tailrace.perf.remaining` says, and take one more token of KV per step until then.
    """
    swappable = instance.host_kv_capacity_tokens - instance.host_kv_tokens
    missing_tokens = tokens + instance.prefill_backlog_tokens - instance.kv_free_tokens - max(0, swappable)
    if missing_tokens <= 0:
        return 0.0
    decoding = list(islice((r for r in instance.requests if r.phase is not Phase.PREFILL), SAMPLE))
    held = sum(request.kv_tokens for request in decoding)
    # Counts are corrected between reports, and may be zero although requests hold KV.
    used = max(instance.kv_used_tokens, held)
    if held == 0 or instance.token_interval_s <= 0.0:
        # Nothing decodes: KV is held by prompts in prefill, or the prompt fits nowhere.
        return 0.0 if tokens <= instance.kv_capacity_tokens else math.inf
    # Mean seconds until all of them have ended, and the tokens freed per second, without growth.
    remaining = mean_remaining_tokens(decoding)
    ended_s = max(1.0, remaining) * instance.token_interval_s
    freed_per_s = used / ended_s
    net_per_s = freed_per_s * (1.0 - remaining * len(decoding) / held)
    # If growth takes as much as is freed, there is room only once what runs now has ended.
    longest_s = max(ended_s, missing_tokens / freed_per_s)
    return min(missing_tokens / net_per_s, longest_s) if net_per_s > 0.0 else longest_s
