"""Count an instance's requests by phase for PASCAL's Algorithms 1 and 2 (section IV-B), and list its prompts.

The function `phase_load` counts any sequence of requests; sequences that know their counts return them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tailrace.cluster import InstanceView, Phase, PhaseLoad, RequestState, RequestView
from tailrace.intra.base import QUANTUM_TOKENS

# Arrival time in seconds, and length in tokens.
Prompt = tuple[float, int]


class ListsPrompts:
    """A collection of requests that lists their prompts without creating a view of each.

    Not an abstract base class, for which `isinstance` takes six times as long: policies ask for each instance
    of the cluster.
    """

    __slots__ = ()

    def prompts(self) -> Sequence[Prompt]:
        """Return what the function `prompts` returns for these requests."""
        raise NotImplementedError


def prompts(instance: InstanceView) -> Sequence[Prompt]:
    """Return the prompts of the instance's requests in prefill, in any order."""
    requests = instance.requests
    if isinstance(requests, ListsPrompts):
        return requests.prompts()
    prefill = Phase.PREFILL
    return [(r.arrival_s, r.prompt_tokens) for r in requests if r.phase is prefill]


OFF_DEVICE: Final = (RequestState.WAITING, RequestState.PREEMPTED)


class CountsPhases:
    """A collection of requests that counts them without creating a view of each. Not abstract, like
    ListsPrompts."""

    __slots__ = ()

    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Return what the function `phase_load` returns for these requests."""
        raise NotImplementedError

    def reasoning(self) -> int:
        """Return the count of reasoning requests alone."""
        return self.phase_load(QUANTUM_TOKENS, "").reasoning


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


def reasoning(requests: Iterable[RequestView]) -> int:
    """Return `phase_load(requests).reasoning`, which no quantum affects."""
    if isinstance(requests, CountsPhases):
        return requests.reasoning()
    return phase_load(requests).reasoning


class PhaseShare(NamedTuple):
    """One request's share of its instance's counts."""

    reasoning: bool
    fresh: bool
    # Infinite: the request does not affect whether its instance meets the SLO.
    slack_tokens: float


def phase_share(request: RequestView, quantum_tokens: int) -> PhaseShare:
    """Return what a request counts as; see `phase_load`."""
    return share_of(
        request.phase is Phase.ANSWERING,
        request.demoted,
        request.pacer_slack_tokens,
        request.phase_tokens,
        request.state in OFF_DEVICE,
        quantum_tokens,
    )


def share_of(
    answering: bool,
    demoted: bool,
    slack_tokens: float | None,
    phase_tokens: int,
    off_device: bool,
    quantum_tokens: int,
) -> PhaseShare:
    """Return what a request with these properties counts as. `slack_tokens`: None before the answer
    begins."""
    if not answering:
        return _DEMOTED if demoted else _REASONING
    if slack_tokens is None:
        slack_tokens = -math.inf if off_device and not phase_tokens else math.inf
    return PhaseShare(False, phase_tokens < quantum_tokens, slack_tokens)


_REASONING: Final = PhaseShare(True, False, math.inf)
_DEMOTED: Final = PhaseShare(False, False, math.inf)
