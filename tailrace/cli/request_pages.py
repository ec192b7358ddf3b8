"""Fetch running requests from the admin API, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tailrace.cli.admin import CALL_TIMEOUT_S
from tailrace.v1.admin_pb2 import ListRequestsRequest, RequestInfo, RequestOrder
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.types_pb2 import Phase

_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Listing:
    """Which requests are listed, in which order, and how many at most (None: all)."""

    instance_id: str = ""
    phase: Phase.ValueType = Phase.PHASE_UNSPECIFIED
    order: RequestOrder.ValueType = RequestOrder.REQUEST_ORDER_UNSPECIFIED
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Requests, how many there are in all, and whether these are the last of the listing."""

    requests: list[RequestInfo]
    total: int
    last: bool


def pages(stub: AdminStub, listing: Listing) -> Iterator[Page]:
    """Yield at least one page. Raise grpc.RpcError."""
    left, token = listing.limit, ""
    while True:
        request = ListRequestsRequest(
            instance_id=listing.instance_id,
            phase=listing.phase,
            order=listing.order,
            page_size=_PAGE if left is None else min(left, _PAGE),
            page_token=token,
        )
        reply = stub.ListRequests(request, timeout=CALL_TIMEOUT_S)
        left = None if left is None else max(0, left - len(reply.requests))
        token = reply.next_page_token
        last = not token or left == 0
        yield Page(list(reply.requests), reply.total_size, last)
        if last:
            return


def first_page(stub: AdminStub, listing: Listing) -> Page:
    """Return the requests of a listing whose limit is small enough for one page."""
    return next(pages(stub, listing))
