"""An instance's requests counted as PASCAL's algorithms want them (section IV-B), and its prompts.

A function counts any sequence of requests, and `PhaseCounts` the same as they come, change and go.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tailrace.cluster import InstanceView, Phase, PhaseLoad, RequestState, RequestView
from tailrace.intra.base import QUANTUM_TOKENS

# When it arrived, and its prompt's tokens.
Prompt = tuple[float, int]


class ListsPrompts(ABC):
    """Requests whose prompts can be told without making a view of each."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """What the function `prompts` returns for them."""


def prompts(instance: InstanceView) -> Sequence[Prompt]:
    """As the view says; else read off its requests. In any order."""
    if instance.prompts is not None:
        return instance.prompts
    requests = instance.requests
    if isinstance(requests, ListsPrompts):
        return requests.prompts()
    prefill = Phase.PREFILL
    return [(r.arrival_s, r.prompt_tokens) for r in requests if r.phase is prefill]


_OFF_DEVICE = (RequestState.WAITING, RequestState.PREEMPTED)


class CountsPhases(ABC):
    """Requests that can be counted without making a view of each."""

    @abstractmethod
    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """What the function `phase_load` returns for them."""


def phase_load(
    requests: Iterable[RequestView], *, quantum_tokens: int = QUANTUM_TOKENS, without: str = ""
) -> PhaseLoad:
    """Count `requests`, except the one whose id is `without`.

    Prefill counts as reasoning (footnote 2). A demoted request is in neither count: it is out of the
    high-priority queue, and it is not new in the low-priority one. An answering request that waits for its
    first token without a place on the device has an empty pacer that nothing fills: its slack is minus
    infinity.
    """
    if isinstance(requests, CountsPhases):
        return requests.phase_load(quantum_tokens, without)
    reasoning = fresh = 0
    least_slack = math.inf
    for request in requests:
        if without and request.request_id == without:
            continue
        share = phase_share(request, quantum_tokens)
        reasoning += share.reasoning
        fresh += share.fresh
        if share.slack_tokens < least_slack:
            least_slack = share.slack_tokens
    return PhaseLoad(reasoning, fresh, least_slack, quantum_tokens)


class PhaseShare(NamedTuple):
    """What one request adds to its instance's counts."""

    reasoning: bool
    fresh: bool
    # Infinite: it does not tell whether its instance meets the SLO.
    slack_tokens: float


def phase_share(request: RequestView, quantum_tokens: int) -> PhaseShare:
    """The one place where it is decided what a request counts for; see `phase_load`."""
    if request.phase is not Phase.ANSWERING:
        return _DEMOTED if request.demoted else _REASONING
    slack = request.pacer_slack_tokens
    if slack is None:
        blocked = not request.phase_tokens and request.state in _OFF_DEVICE
        slack = -math.inf if blocked else math.inf
    return PhaseShare(False, request.phase_tokens < quantum_tokens, slack)


_REASONING: Final = PhaseShare(True, False, math.inf)
_DEMOTED: Final = PhaseShare(False, False, math.inf)


class PhaseCounts:
    """What `phase_load` counts, in constant time a change; the least slack alone is looked
    for anew after the request that had it has gone. And what `prompts` tells."""

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
