"""Counts over an instance's requests, and its prompts, kept as requests come, change and go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from tailrace.cluster import Phase, PhaseLoad, RequestView
from tailrace.policy.phase_load import phase_share


class PhaseCounts:
    """What tailrace.policy.phase_load counts, in constant time a change; the least slack alone is looked
    for anew after the request that had it has gone. And what tailrace.policy.prompts tells."""

    def __init__(self, quantum_tokens: int) -> None:
        """`quantum_tokens`: an answering request with fewer output tokens is fresh."""
        self._quantum_tokens = quantum_tokens
        # By when they arrived and their tokens; two may be alike.
        self._prompts: Counter[tuple[float, int]] = Counter()
        self._reasoning = 0
        self._fresh = 0
        self._least = math.inf
        self._least_is_known = True

    def reset(self, requests: Iterable[RequestView]) -> None:
        """Count these requests and no others."""
        self._prompts.clear()
        self._reasoning = self._fresh = 0
        self._least, self._least_is_known = math.inf, True
        for request in requests:
            self.add(request)

    def add(self, request: RequestView) -> None:
        """Count a request that has come."""
        self._least = min(self._least, self._count(request, 1))

    def remove(self, request: RequestView) -> None:
        """Leave out a request that has gone; it must be as it was when it was added."""
        slack = self._count(request, -1)
        if slack != math.inf and slack <= self._least:
            self._least_is_known = False

    def load(self, requests: Iterable[RequestView]) -> PhaseLoad:
        """The counts; `requests`: all that there are, if they must be asked."""
        if not self._least_is_known:
            slacks = (phase_share(request, self._quantum_tokens).slack_tokens for request in requests)
            self._least, self._least_is_known = min(slacks, default=math.inf), True
        return PhaseLoad(self._reasoning, self._fresh, self._least, self._quantum_tokens)

    def prompts(self) -> tuple[tuple[float, int], ...]:
        """(when it arrived, prompt tokens) of each request in prefill."""
        return tuple(self._prompts.elements())

    def _count(self, request: RequestView, by: int) -> float:
        """Add or take away what the request counts for; its slack."""
        if request.phase is Phase.PREFILL:
            prompt = request.arrival_s, request.prompt_tokens
            self._prompts[prompt] += by
            if not self._prompts[prompt]:
                del self._prompts[prompt]
        share = phase_share(request, self._quantum_tokens)
        self._reasoning += by * share.reasoning
        self._fresh += by * share.fresh
        return share.slack_tokens
