"""Flip instances by the number of requests predicted to meet their SLOs (ours; parameter flips=attainment).

Arrow flips to prefill if one prompt is predicted to miss its SLO and decode load is low, and to decode if a
threshold is exceeded, regardless of the effect on the other side (sections 5.3 and 5.5). This model weighs
the effect of a flip on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from tailrace.cluster import Arrival, InstanceView, Phase, RequestView
from tailrace.perf.remaining import SAMPLE, mean_remaining_tokens
from tailrace.policy.arrow.load import LoadModel
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.requests import table_of

# Predict how long a prompt waits for KV on its prefill instance (ours; parameter kv_wait).
#
# Arrow predicts TTFT from the queue of prompts alone (section 5.3). A prefilled request keeps its KV on the
# prefill instance until a decode instance has room for it, so a shortage of KV on decode instances delays
# prompts even if their queue is short.


class KvWait:
    """Predict the seconds until an instance has free KV for a prompt, from one view.

    A fluid model: KV is freed at a constant rate, which follows from the mean remaining length of requests
    (tailrace.perf.remaining).
    """

    def __init__(self, pools: Pools, interval_s: float) -> None:
        """`interval_s`: token interval of instances that report none yet."""
        self._default_interval_s = interval_s
        self._decoders = (*pools.decode, *pools.prefill_to_decode)
        self._sources = (*pools.prefill, *pools.decode_to_prefill)
        self._held: dict[str, int] = {}

    def wait_s(self, instance: InstanceView, tokens: int) -> float:
        """Return the wait of a prompt of `tokens` that arrives now, behind the prompts already queued.

        Infinite: the requests on the instance will never free enough KV.
        """
        short = tokens + instance.prefill_backlog_tokens - instance.kv_free_tokens
        if short > 0 and self._handovers_flow:
            short -= self._held_tokens(instance)
        if short <= 0:
            return 0.0
        held = self._held_tokens(instance)
        # KV freed by requests that end here, and by handovers: a share of what the decode instances free.
        waiting = sum(self._held_tokens(source) for source in self._sources)
        share = held / waiting if waiting else 0.0
        rate = self._rate(instance, held) + self._freed_by_decoders * share
        return short / rate if rate > 0.0 else math.inf

    # Needed only if KV is short, which is rare.

    @cached_property
    def _handovers_flow(self) -> bool:
        """Return whether any decode instance has room, so that requests leave the prefill instances at
        once."""
        return any(i.kv_free_tokens > 0 for i in self._decoders)

    @cached_property
    def _freed_by_decoders(self) -> float:
        """Return the rate at which decode instances free KV, in tokens per second."""
        return sum(self._rate(i, i.kv_used_tokens) for i in self._decoders)

    @cached_property
    def _remaining_tokens(self) -> float:
        """Return the mean number of output tokens left per request; at least one."""
        sample = list(islice(_decoding(self._decoders), SAMPLE))
        return max(1.0, mean_remaining_tokens(sample)) if sample else 1.0

    def _rate(self, instance: InstanceView, tokens: int) -> float:
        """Return the rate at which requests that hold `tokens` of KV free it by ending, in tokens per
        second."""
        interval_s = instance.token_interval_s or self._default_interval_s
        return tokens / (self._remaining_tokens * interval_s) if interval_s > 0.0 else 0.0

    def _held_tokens(self, instance: InstanceView) -> int:
        """Return the KV tokens of the instance's requests that are past prefill."""
        held = self._held.get(instance.instance_id)
        if held is None:
            prefill = Phase.PREFILL
            held = sum(r.kv_tokens for r in instance.requests if r.phase is not prefill)
            self._held[instance.instance_id] = held
        return held


def _decoding(decoders: Iterable[InstanceView]) -> Iterator[RequestView]:
    for instance in decoders:
        for request in instance.requests:
            if request.phase is not Phase.PREFILL:
                yield request


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
