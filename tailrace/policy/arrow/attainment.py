"""Flip instances by the number of requests predicted to meet their SLOs (ours; parameter flips=attainment).

Arrow flips to prefill if one prompt is predicted to miss its SLO and decode load is low, and to decode if a
threshold is exceeded, regardless of the effect on the other side (sections 5.3 and 5.5). This model weighs
the effect of a flip on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.cluster import Arrival, InstanceView
from tailrace.policy.arrow.kv_wait import KvWait
from tailrace.policy.arrow.load import LoadModel
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.requests import table_of


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of all instances of a view, independent of pools."""

    # Prompts expected within the next period of one TTFT SLO, as many as arrived in the last one; and their
    # mean length.
    prompts: int
    prompt_tokens: int
    # Requests past prefill, and their tokens.
    decoding: int
    decode_tokens: int

    @property
    def requests(self) -> int:
        """Return the number of prompts and decoding requests."""
        return self.prompts + self.decoding


@dataclass(frozen=True, slots=True)
class AttainmentModel:
    """Predict SLO attainment from the instances' loads.

    `flip_gain`: minimum gain of a flip as a share of all requests; at least one request. `kv_wait`: whether
    prompts also wait for KV.
    """

    loads: LoadModel
    ttft_slo_s: float
    tpot_slo_s: float
    flip_gain: float
    kv_wait: bool

    def demand(self, pools: Pools, now: float, arrival: Arrival | None = None) -> Demand:
        """Return the demand on these instances; `arrival` counts as one more prompt."""
        in_prefill = [
            prompt
            for instance in pools.members()
            # Without prefill work, skip reading the requests.
            if instance.prefill_backlog_tokens > 0 or instance.waiting > 0
            for prompt in table_of(instance.requests).prompts()
        ]
        # A prompt that was just placed has no arrival time yet.
        recent = [tokens for at_s, tokens in in_prefill if not at_s or at_s > now - self.ttft_slo_s]
        if arrival is not None:
            recent.append(arrival.prompt_tokens + arrival.output_tokens)
        load = sum(i.load for i in pools.members())
        context = sum(i.context_tokens for i in pools.members())
        return Demand(
            prompts=len(recent),
            prompt_tokens=sum(recent) // len(recent) if recent else 0,
            decoding=max(0, load - len(in_prefill)),
            decode_tokens=max(0, context - sum(tokens for _, tokens in in_prefill)),
        )

    def attained(self, pools: Pools, demand: Demand) -> float:
        """Return the predicted number of `demand.requests` that meet their SLOs."""
        return self._prompts_in_time(pools, demand) + self._decoded_in_time(pools, demand)

    def flip_gain_requests(self, before: Pools, after: Pools, demand: Demand) -> float:
        """Return how many more requests meet their SLOs after a flip; 0.0 if that is below `flip_gain`."""
        gain = self.attained(after, demand) - self.attained(before, demand)
        return gain if gain >= max(1.0, self.flip_gain * demand.requests) else 0.0

    def _prompts_in_time(self, pools: Pools, demand: Demand) -> float:
        """Return the number of prompts that the prefill instances can finish within the TTFT SLO."""
        tokens = demand.prompt_tokens
        wait = KvWait(pools, self.tpot_slo_s) if self.kv_wait else None
        in_time = 0.0
        for instance in (*pools.prefill, *pools.decode_to_prefill, *pools.unpooled):
            prefill_s = self.loads.prefill_s(instance, tokens)
            delay_s = self.loads.prefill_delay_s(instance)
            if wait is not None:
                delay_s = max(delay_s, wait.wait_s(instance, tokens))
            left_s = self.ttft_slo_s - delay_s - prefill_s
            if left_s >= 0.0:
                in_time += 1.0 + (left_s / prefill_s if prefill_s > 0.0 else demand.prompts)
        return min(float(demand.prompts), in_time)

    def _decoded_in_time(self, pools: Pools, demand: Demand) -> float:
        """Return the number of decoding requests that the decode instances can run within the TPOT SLO."""
        if not demand.decode_tokens:
            return float(demand.decoding)
        capacity = sum(map(self._decode_capacity, (*pools.decode, *pools.prefill_to_decode, *pools.unpooled)))
        return demand.decoding * min(1.0, capacity / demand.decode_tokens)

    def _decode_capacity(self, instance: InstanceView) -> float:
        """Return the tokens that the instance can run within the TPOT SLO: Max Running Tokens, less if its
        token interval already exceeds the SLO."""
        capacity = float(self.loads.max_tokens(instance))
        interval_s = instance.token_interval_s
        if interval_s > self.tpot_slo_s:
            capacity = min(capacity, instance.context_tokens * self.tpot_slo_s / interval_s)
        return capacity
