"""An instance's requests counted as PASCAL's algorithms want them (section IV-B)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, NamedTuple

from tailrace.cluster import Phase, PhaseLoad, RequestState, RequestView
from tailrace.intra.base import QUANTUM_TOKENS

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
