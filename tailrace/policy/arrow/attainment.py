"""Flips by the number of requests that are predicted to keep their SLOs (ours).

Arrow flips to prefill when one prompt is predicted late and decode load is low, and to decode when a
threshold is passed, whatever that does to the other side (sections 5.3 and 5.5). Here a flip either way is
weighed by what it does to both.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.cluster import Arrival, InstanceView
from tailrace.policy.arrow.kv_wait import KvWait
from tailrace.policy.arrow.load import LoadModel
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.phase_load import prompts


@dataclass(frozen=True, slots=True)
class Demand:
    """What the instances of a view have to do, whatever pools they are in."""

    # Prompts expected within a TTFT SLO: as many as arrived within the last one; the mean of their lengths.
    prompts: int
    prompt_tokens: int
    # Requests past prefill, and their tokens.
    decoding: int
    decode_tokens: int

    @property
    def requests(self) -> int:
        """All of them."""
        return self.prompts + self.decoding


@dataclass(frozen=True, slots=True)
class AttainmentModel:
    """Predicts from loads.

    `flip_gain`: share of the requests that a flip must bring within their SLOs; one request at least.
    `kv_wait`: whether waiting for KV delays prompts.
    """

    loads: LoadModel
    ttft_slo_s: float
    tpot_slo_s: float
    flip_gain: float
    kv_wait: bool

    def demand(self, pools: Pools, now: float, arrival: Arrival | None = None) -> Demand:
        """`arrival`: one more prompt."""
        in_prefill = [
            prompt
            for instance in pools.members()
            # Without any left to compute there is none to look for.
            if instance.prefill_backlog_tokens > 0 or instance.waiting > 0
            for prompt in prompts(instance)
        ]
        # One that was placed a moment ago has no time of arrival yet.
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
        """Requests that keep their SLOs, of `demand.requests`."""
        return self._prompts_in_time(pools, demand) + self._decoded_in_time(pools, demand)

    def pays(self, before: Pools, after: Pools, demand: Demand) -> float:
        """Requests more that keep their SLOs after a flip; 0.0 when that is not enough to flip for."""
        gain = self.attained(after, demand) - self.attained(before, demand)
        return gain if gain >= max(1.0, self.flip_gain * demand.requests) else 0.0

    def _prompts_in_time(self, pools: Pools, demand: Demand) -> float:
        """Those that the prefill instances can finish within the TTFT SLO."""
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
        """Those whose tokens the decode instances can carry within the TPOT SLO and their KV."""
        if not demand.decode_tokens:
            return float(demand.decoding)
        carried = sum(map(self._carries, (*pools.decode, *pools.prefill_to_decode, *pools.unpooled)))
        return demand.decoding * min(1.0, carried / demand.decode_tokens)

    def _carries(self, instance: InstanceView) -> float:
        """Tokens that the instance runs within the TPOT SLO: as profiled, and no more than its steps show."""
        most = float(self.loads.most_tokens(instance))
        interval_s = instance.token_interval_s
        if interval_s > self.tpot_slo_s:
            most = min(most, instance.context_tokens * self.tpot_slo_s / interval_s)
        return most
