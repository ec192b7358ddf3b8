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
from typing import Final

from tailrace.cluster import InstanceView, Phase, RequestView
from tailrace.policy.arrow.pools import Pools

# Requests that are looked at for how many tokens are still to come.
_SAMPLE: Final = 64


class KvWait:
    """Seconds until an instance has KV for a prompt, from one view.

    Rates are those of a fluid: a request whose remaining length is not predicted makes, on average, as many
    tokens more as it has made by now, which holds for any distribution of lengths in a steady state (the age
    and the residual life of a renewal process have one distribution).
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
        if short <= 0:
            return 0.0
        held = self._held_tokens(instance)
        if self._handovers_flow:
            short -= held
        if short <= 0:
            return 0.0
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
        found = list(islice(_decoding(self._decoders), _SAMPLE))
        if not found:
            return 1.0
        predicted = ((r.predicted_remaining_tokens, r.output_tokens) for r in found)
        to_come = sum(made if remaining is None else remaining for remaining, made in predicted)
        return max(1.0, to_come / len(found))

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
