"""Refuse a request whose first token would come too late, when it arrives rather than after its wait."""

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
    """Judges placements by the TTFT that they promise. The policy has chosen: it alone knows where to.

    `within_s`: longest predicted TTFT of a request that is taken. An instance of which nobody knows how long
    prompts take there takes everything.
    """

    within_s: float

    @staticmethod
    def of(slo: Slo) -> TtftAdmission | None:
        """What these objectives ask for; None: to refuse nobody."""
        if slo.admit is None or slo.ttft_s is None:
            return None
        return TtftAdmission(slo.admit * slo.ttft_s)

    def judge(self, view: ClusterView, arrival: Arrival, placement: Placement) -> Placement:
        """The placement, or its refusal. A request that has been taken before is never refused."""
        if isinstance(placement, Refuse) or arrival.admitted or arrival.output_tokens:
            return placement
        instance = view.instances.get(placement.instance_id)
        if instance is None:
            return placement
        # One that is not of the request's model gives it nothing.
        pull_from = placement.pull_from if placement.pull_from in view.instances else ""
        predicted_s = self.first_token_s(instance, arrival, pull_from)
        if predicted_s is None or predicted_s <= self.within_s:
            return placement
        first = f"in {predicted_s:.1f} s" if math.isfinite(predicted_s) else "at no time that can be told"
        return Refuse(
            f"its first token would come {first}, and has to within {self.within_s:g} s", final=True
        )

    def first_token_s(self, instance: InstanceView, arrival: Arrival, pull_from: str = "") -> float | None:
        """Seconds to the request's first token if it is placed there, its prefix fetched from another
        instance (empty: from none); None: not known.

        Arrow's prediction (section 5.3), the prompts before it and its own, what is cached left out; or,
        where KV is short, the time until there is some for it, if that is longer.
        """
        ttft = instance.ttft
        if ttft is None:
            if instance.measured is None:
                return None
            ttft = instance.measured.ttft
        delay_s = instance.prefill_delay_s
        if delay_s is None:
            delay_s = ttft.backlog_s(instance.prefill_backlog_tokens, instance.waiting)
        found = arrival.found_tokens(instance.instance_id, pull_from)
        own_s = ttft.prefill_s(arrival.context_tokens) - ttft.computed_s(found)
        # Blocks that are in use by others already need no room. Which are is not known: all are taken to be.
        lacking = arrival.context_tokens - arrival.cached_tokens(instance.instance_id)
        return max(delay_s, kv_wait_s(instance, lacking)) + own_s


def kv_wait_s(instance: InstanceView, tokens: int) -> float:
    """Seconds until an instance has KV for a prompt of so many tokens, behind the prompts that wait there.

    Infinite: nothing that is there will ever free so much. KV that can be swapped out to host memory counts
    as free. What runs frees KV as it ends, which it does after as many tokens as requests make on average
    (tailrace.perf.remaining), and takes a token of it at each step until then.
    """
    swappable = instance.host_kv_capacity_tokens - instance.host_kv_tokens
    short = tokens + instance.prefill_backlog_tokens - instance.kv_free_tokens - max(0, swappable)
    if short <= 0:
        return 0.0
    decoding = list(islice((r for r in instance.requests if r.phase is not Phase.PREFILL), SAMPLE))
    held = sum(request.kv_tokens for request in decoding)
    # Counts are corrected between reports, and may say that nothing is held although requests hold it.
    used = max(instance.kv_used_tokens, held)
    if held == 0 or instance.token_interval_s <= 0.0:
        # Nothing decodes: what is held is the KV of prompts under way, or the prompt fits nowhere.
        return 0.0 if tokens <= instance.kv_capacity_tokens else math.inf
    # Seconds until all of it has ended, on average, and how much of it that is a second, growth left out.
    remaining = mean_remaining_tokens(decoding)
    ended_s = max(1.0, remaining) * instance.token_interval_s
    freed_per_s = used / ended_s
    net_per_s = freed_per_s * (1.0 - remaining * len(decoding) / held)
    # Where growth takes as much as is freed, room comes when what runs now has ended.
    longest_s = max(ended_s, short / freed_per_s)
    return min(short / net_per_s, longest_s) if net_per_s > 0.0 else longest_s
