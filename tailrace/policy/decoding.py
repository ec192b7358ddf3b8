"""What CascadeInfer and Arrow ask of an instance's requests: which are past prefill, and how long they are.

The functions read any sequence of requests; sequences that know the answers without creating a view of each
request return them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tailrace.cluster import Phase, RequestView

# Prompt tokens, and tokens of context, of one request each.
Lengths = tuple[Sequence[int], Sequence[int]]


class DecodingRequests(NamedTuple):
    """Requests of an instance that are past prefill and not migrating, by column."""

    request_ids: Sequence[str]
    context_tokens: Sequence[int]
    arrival_s: Sequence[float]


class ListsDecoding:
    """A collection of requests that answers these questions. Not abstract, like phase_load.CountsPhases."""

    __slots__ = ()

    def decoding(self) -> DecodingRequests:
        """Return what the function `decoding` returns for these requests."""
        raise NotImplementedError

    def any_decoding(self) -> bool:
        """Return what the function `any_decoding` returns for these requests."""
        raise NotImplementedError

    def migrating_tokens(self) -> int:
        """Return what the function `migrating_tokens` returns for these requests."""
        raise NotImplementedError

    def lengths(self) -> Lengths:
        """Return what the function `lengths` returns for these requests."""
        raise NotImplementedError

    def in_prefill(self) -> Sequence[RequestView]:
        """Return what the function `in_prefill` returns for these requests."""
        raise NotImplementedError


def decodes(request: RequestView) -> bool:
    """Return whether a request is past prefill and not migrating."""
    return request.phase is not Phase.PREFILL and not request.migrating


def decoding(requests: Sequence[RequestView]) -> DecodingRequests:
    """Return the requests that are past prefill and not migrating, in any order."""
    if isinstance(requests, ListsDecoding):
        return requests.decoding()
    return decoding_columns(requests)


def decoding_columns(requests: Iterable[RequestView]) -> DecodingRequests:
    """Return those of the requests that are past prefill and not migrating, in their order."""
    among = list(filter(decodes, requests))
    return DecodingRequests(
        [r.request_id for r in among], [r.context_tokens for r in among], [r.arrival_s for r in among]
    )


def any_decoding(requests: Sequence[RequestView]) -> bool:
    """Return whether any request is past prefill and not migrating."""
    if isinstance(requests, ListsDecoding):
        return requests.any_decoding()
    return any(map(decodes, requests))


def migrating_tokens(requests: Sequence[RequestView]) -> int:
    """Return the context of the requests that are migrating away, in tokens."""
    if isinstance(requests, ListsDecoding):
        return requests.migrating_tokens()
    return sum(r.context_tokens for r in requests if r.migrating)


def lengths(requests: Sequence[RequestView]) -> Lengths:
    """Return the lengths of all requests, in any order."""
    if isinstance(requests, ListsDecoding):
        return requests.lengths()
    return [r.prompt_tokens for r in requests], [r.context_tokens for r in requests]


def in_prefill(requests: Sequence[RequestView]) -> Sequence[RequestView]:
    """Return the requests in prefill, in their order."""
    if isinstance(requests, ListsDecoding):
        return requests.in_prefill()
    return [r for r in requests if r.phase is Phase.PREFILL]
