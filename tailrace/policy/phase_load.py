"""Count an instance's requests by phase for PASCAL's Algorithms 1 and 2 (section IV-B), and list its prompts.

The function `phase_load` counts any sequence of requests; `PhaseCounts` maintains the same counts
incrementally.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tailrace.cluster import InstanceView, Phase, PhaseLoad, RequestState, RequestView
from tailrace.intra.base import QUANTUM_TOKENS

# Arrival time in seconds, and length in tokens.
Prompt = tuple[float, int]


class ListsPrompts(ABC):
    """A collection of requests that lists their prompts without creating a view of each."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Return what the function `prompts` returns for these requests."""


def prompts(instance: InstanceView) -> Sequence[Prompt]:
    """Return the prompts of the instance's requests in prefill, in any order."""
    if instance.prompts is not None:
        return instance.prompts
    requests = instance.requests
    if isinstance(requests, ListsPrompts):
        return requests.prompts()
    prefill = Phase.PREFILL
    return [(r.arrival_s, r.prompt_tokens) for r in requests if r.phase is prefill]


_OFF_DEVICE = (RequestState.WAITING, RequestState.PREEMPTED)


class CountsPhases(ABC):
    """A collection of requests that counts them without creating a view of each."""

    @abstractmethod
    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Return what the function `phase_load` returns for these requests."""


def phase_load(
    requests: Iterable[RequestView], *, quantum_tokens: int = QUANTUM_TOKENS, without: str = ""
) -> PhaseLoad:
    """Count `requests`, except the one whose id is `without`.

    Prefill counts as reasoning (footnote 2). A demoted request is in neither count: it has left the
    high-priority queue, and is not fresh in the low-priority one. An answering request that waits for its
    first token off the device has an empty pacer that stays empty: its slack is minus infinity.
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
    """One request's share of its instance's counts."""

    reasoning: bool
    fresh: bool
    # Infinite: the request does not affect whether its instance meets the SLO.
    slack_tokens: float


def phase_share(request: RequestView, quantum_tokens: int) -> PhaseShare:
    """Return what a request counts as; see `phase_load`."""
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
    """Maintain the results of `phase_load` and `prompts` in constant time per change.

    Only the least slack is recomputed, after the request that had it was removed.
    """

    def __init__(self, quantum_tokens: int) -> None:
        """`quantum_tokens`: an answering request with fewer answering tokens is fresh."""
        self._quantum_tokens = quantum_tokens
        # A multiset: two prompts may have the same arrival time and length.
        self._prompts: Counter[tuple[float, int]] = Counter()
        self._reasoning = 0
        self._fresh = 0
        self._least = math.inf
        self._least_is_known = True

    def reset(self, requests: Iterable[RequestView]) -> None:
        """Start over with these requests."""
        self._prompts.clear()
        self._reasoning = self._fresh = 0
        self._least, self._least_is_known = math.inf, True
        for request in requests:
            self.add(request)

    def add(self, request: RequestView) -> None:
        """Add a request."""
        self._least = min(self._least, self._count(request, 1))

    def remove(self, request: RequestView) -> None:
        """Remove a request; it must be equal to what was added."""
        slack = self._count(request, -1)
        if slack != math.inf and slack <= self._least:
            self._least_is_known = False

    def load(self, requests: Iterable[RequestView]) -> PhaseLoad:
        """Return the counts; `requests`: all current ones, read only to recompute the least slack."""
        if not self._least_is_known:
            slacks = (phase_share(request, self._quantum_tokens).slack_tokens for request in requests)
            self._least, self._least_is_known = min(slacks, default=math.inf), True
        return PhaseLoad(self._reasoning, self._fresh, self._least, self._quantum_tokens)

    def prompts(self) -> tuple[tuple[float, int], ...]:
        """Return the prompts of requests in prefill."""
        return tuple(self._prompts.elements())

    def _count(self, request: RequestView, by: int) -> float:
        """Add (`by` 1) or subtract (-1) the request's share; return its slack."""
        if request.phase is Phase.PREFILL:
            prompt = request.arrival_s, request.prompt_tokens
            self._prompts[prompt] += by
            if not self._prompts[prompt]:
                del self._prompts[prompt]
        share = phase_share(request, self._quantum_tokens)
        self._reasoning += by * share.reasoning
        self._fresh += by * share.fresh
        return share.slack_tokens
