"""How long a prompt will wait for KV where it is prefilled (ours).

Arrow predicts TTFT from the queue of prompts alone (section 5.3). A request that has been prefilled keeps its
KV on the prefill instance until a decode instance has room for it, so that a shortage of KV among decode
instances holds up prompts, while their queue looks short.
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
    """Seconds until an instance has KV for a prompt, from one view.

    Rates are those of a fluid, in which requests go on for as long as they do on average
    (tailrace.perf.remaining).
    """

    def __init__(self, pools: Pools, interval_s: float) -> None:
        """`interval_s`: of tokens, for an instance that tells none yet."""
        self._default_interval_s = interval_s
        self._decoders = (*pools.decode, *pools.prefill_to_decode)
        self._sources = (*pools.prefill, *pools.decode_to_prefill)
        self._held: dict[str, int] = {}

    def wait_s(self, instance: InstanceView, tokens: int) -> float:
        """For a prompt of that length that arrives now, behind the prompts that are there already.

        Infinite: nothing that is there will ever free so much.
        """
        short = tokens + instance.prefill_backlog_tokens - instance.kv_free_tokens
        if short > 0 and self._handovers_flow:
            short -= self._held_tokens(instance)
        if short <= 0:
            return 0.0
        held = self._held_tokens(instance)
        # What ends here, and what decode instances make room for, in proportion to what waits for it.
        waiting = sum(self._held_tokens(source) for source in self._sources)
        share = held / waiting if waiting else 0.0
        rate = self._rate(instance, held) + self._freed_by_decoders * share
        return short / rate if rate > 0.0 else math.inf

    # Asked for where KV is short alone, which is seldom.

    @cached_property
    def _handovers_flow(self) -> bool:
        """Requests leave the prefill instances at once, as long as any decode instance has room."""
        return any(i.kv_free_tokens > 0 for i in self._decoders)

    @cached_property
    def _freed_by_decoders(self) -> float:
        """Tokens of KV a second."""
        return sum(self._rate(i, i.kv_used_tokens) for i in self._decoders)

    @cached_property
    def _remaining_tokens(self) -> float:
        """Output tokens still to come, a request on average; at least one."""
        found = list(islice(_decoding(self._decoders), SAMPLE))
        return max(1.0, mean_remaining_tokens(found)) if found else 1.0

    def _rate(self, instance: InstanceView, tokens: int) -> float:
        """Tokens of KV a second that requests free by ending, of so many that they hold."""
        interval_s = instance.token_interval_s or self._default_interval_s
        return tokens / (self._remaining_tokens * interval_s) if interval_s > 0.0 else 0.0

    def _held_tokens(self, instance: InstanceView) -> int:
        """KV of requests on the instance that are past prefill."""
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
