"""Counts over an instance's requests, and its prompts, kept as requests come, change and go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from tailrace.cluster import Phase, PhaseLoad, RequestView
from tailrace.intra.base import QUANTUM_TOKENS


class PhaseCounts:
    """As tailrace.policy.phase_load counts, in constant time a change; the least slack alone is looked
    for anew after the request that had it has gone. And what tailrace.policy.prompts tells."""

    def __init__(self) -> None:
        # By when they arrived and their tokens; two may be alike.
        self._prompts: Counter[tuple[float, int]] = Counter()
        self._reasoning = 0
        self._fresh = 0
        self._least = math.inf
        self._least_is_known = True

    def reset(self, requests: Iterable[RequestView]) -> None:
        """These are all the requests."""
        self._prompts.clear()
        self._reasoning = self._fresh = 0
        self._least, self._least_is_known = math.inf, True
        for request in requests:
            self.add(request)

    def add(self, request: RequestView) -> None:
        """It has come."""
        self._count(request, 1)
        slack = _slack(request)
        if slack is not None and slack < self._least:
            self._least = slack

    def remove(self, request: RequestView) -> None:
        """It has gone, as it was when it was added."""
        self._count(request, -1)
        slack = _slack(request)
        if slack is not None and slack <= self._least:
            self._least_is_known = False

    def load(self, requests: Iterable[RequestView]) -> PhaseLoad:
        """The counts; `requests`: all that there are, if they must be asked."""
        if not self._least_is_known:
            slacks = (slack for request in requests if (slack := _slack(request)) is not None)
            self._least, self._least_is_known = min(slacks, default=math.inf), True
        return PhaseLoad(self._reasoning, self._fresh, self._least)

    def prompts(self) -> tuple[tuple[float, int], ...]:
        """(when it arrived, prompt tokens) of each request in prefill."""
        return tuple(self._prompts.elements())

    def _count(self, request: RequestView, by: int) -> None:
        if request.phase is Phase.PREFILL:
            prompt = request.arrival_s, request.prompt_tokens
            self._prompts[prompt] += by
            if not self._prompts[prompt]:
                del self._prompts[prompt]
        if request.phase is not Phase.ANSWERING:
            self._reasoning += 0 if request.demoted else by
        elif request.phase_tokens < QUANTUM_TOKENS:
            self._fresh += by


def _slack(request: RequestView) -> float | None:
    return request.pacer_slack_tokens if request.phase is Phase.ANSWERING else None
