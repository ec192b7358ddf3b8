"""Predict how long a prompt waits for KV on its prefill instance (ours; parameter kv_wait).

Arrow predicts TTFT from the queue of prompts alone (section 5.3). A prefilled request keeps its KV on the
prefill instance until a decode instance has room for it, so a shortage of KV on decode instances delays
prompts even if their queue is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice

from tailrace.cluster import InstanceView, Phase, RequestView
from tailrace.perf.remaining import SAMPLE, mean_remaining_tokens
from tailrace.policy.arrow.pools import Pools


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
