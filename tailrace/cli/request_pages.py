"""Fetch running requests from the admin API, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tailrace.cli.admin import CALL_TIMEOUT_S
from tailrace.v1.admin_pb2 import ListRequestsReply, ListRequestsRequest, RequestInfo
from tailrace.v1.admin_pb2_grpc import AdminStub

_PAGE: Final = 1_000


def pages(
    stub: AdminStub, listing: ListRequestsRequest, limit: int | None = None
) -> Iterator[ListRequestsReply]:
    """Yield the pages of a listing, at least one, with `limit` requests at most (None: all).

    The last one has no `next_page_token`. Raise grpc.RpcError.
    """
    request, left = ListRequestsRequest(), limit
    request.CopyFrom(listing)
    while True:
        request.page_size = _PAGE if left is None else min(left, _PAGE)
        reply = stub.ListRequests(request, timeout=CALL_TIMEOUT_S)
        if left is not None:
            left = max(0, left - len(reply.requests))
            if not left:
                reply.next_page_token = ""
        yield reply
        if not reply.next_page_token:
            return
        request.page_token = reply.next_page_token


def all_requests(
    stub: AdminStub, listing: ListRequestsRequest, limit: int | None = None
) -> Iterator[RequestInfo]:
    """Yield the requests on these pages, each as it arrives. Raise grpc.RpcError."""
    for page in pages(stub, listing, limit):
        yield from page.requests
