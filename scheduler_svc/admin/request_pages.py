"""List requests in pages.

A page says where the next one begins by the last request on it, not by a position: any scheduler can make
the next page, and requests that come and go meanwhile shift nothing. Only the requests on a page are
converted; the others are read by id, phase and arrival, in slices between which placements get their turn.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Final, TypeVar

import grpc
import msgspec

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.listing import request_info
from scheduler_svc.admin.validation import check_instance
from tailrace.cluster import Phase
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.messages import PHASES
from tailrace.service.tasks import in_slices
from tailrace.v1 import admin_pb2

PAGE_MAX: Final = 5_000
"""Most requests on a page: a message of about 1 MiB."""

# Seconds: after every arrival.
_UNKNOWN_S: Final = 1e12

T = TypeVar("T", str, float)


class _Token(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a page token: the listing, and its last request so far, by instance or arrival."""

    instance_id: str
    phase: int
    order: int
    after: str | float
    request_id: str


async def request_page(
    state: ReportedCluster, request: admin_pb2.ListRequestsRequest, wall_s: float
) -> admin_pb2.ListRequestsReply:
    """Return the requested page; `wall_s` is the time of day.

    Raise AdminError: NOT_FOUND for an unknown instance, INVALID_ARGUMENT for an unknown phase or order, and a
    page token that is none or of another listing.
    """
    if request.instance_id:
        check_instance(state, "instance_id", request.instance_id)
    if request.phase and request.phase not in PHASES:
        raise _invalid(f"phase: there is no phase {request.phase}")
    if request.order not in admin_pb2.RequestOrder.values():
        raise _invalid(f"order: there is no order {request.order}")
    size = min(request.page_size, PAGE_MAX) or None
    # One more than the page has shows whether there is another page.
    limit = None if size is None else size + 1
    positions: Sequence[tuple[str | float, str]]
    if request.order == admin_pb2.REQUEST_ORDER_OLDEST:
        positions, total = await _oldest(state, request, _page_start(request, float), limit)
    else:
        positions, total = await _by_instance(state, request, _page_start(request, str), limit)
    shown = positions[:size]
    # Each once, also if it was found on two instances, because it moved from one to the other meanwhile.
    request_ids = dict.fromkeys(request_id for _, request_id in shown)
    infos = [
        request_info(state, tracked, wall_s)
        async for request_id in in_slices(request_ids)
        # It may have finished, left the instance or entered another phase meanwhile.
        if (tracked := state.request(request_id)) is not None
        and request.instance_id in ("", tracked.instance_id)
        and tracked.phase is PHASES.get(request.phase, tracked.phase)
    ]
    reply = admin_pb2.ListRequestsReply(requests=infos, total_size=total)
    if len(shown) < len(positions):
        token = _Token(request.instance_id, request.phase, request.order, *shown[-1])
        reply.next_page_token = base64.urlsafe_b64encode(msgspec.json.encode(token)).decode()
    return reply


async def _by_instance(
    state: ReportedCluster,
    request: admin_pb2.ListRequestsRequest,
    after: tuple[str, str] | None,
    limit: int | None,
) -> tuple[list[tuple[str, str]], int]:
    """Return instance and id of the first `limit` requests after that one, and how many there are in all."""
    phase = PHASES.get(request.phase)
    positions: list[tuple[str, str]] = []
    async for name in in_slices(_instances(state, request)):
        if limit is not None and len(positions) >= limit:
            break
        if after is None or name >= after[0]:
            on_instance = sorted((name, request_id) for request_id, _ in state.arrivals_on(name, phase))
            positions += (
                on_instance if after is None else [position for position in on_instance if position > after]
            )
    return positions[:limit], await _count(state, request.instance_id, phase)


async def _count(state: ReportedCluster, instance_id: str, phase: Phase | None) -> int:
    """Count the requests on the instance (empty: on any) in the phase (None: in any)."""
    if instance_id:
        return len(state.arrivals_on(instance_id, phase))
    locations = state.locations()
    if phase is None:
        return len(locations)
    return sum([location.phase is phase async for location in in_slices(locations)])


async def _oldest(
    state: ReportedCluster,
    request: admin_pb2.ListRequestsRequest,
    after: tuple[float, str] | None,
    limit: int | None,
) -> tuple[list[tuple[float, str]], int]:
    """Return arrival and id of the oldest `limit` requests after that one, and how many there are in all.

    Those whose arrival is not known, because no report shows them yet, are the last.
    """
    phase = PHASES.get(request.phase)
    begin, end = after or (-math.inf, ""), (math.inf, "")
    # By id: a request may be found on two instances, see above.
    candidates: dict[str, float] = {}
    total = 0
    async for name in in_slices(_instances(state, request)):
        arrivals = state.arrivals_on(name, phase)
        total += len(arrivals)
        for request_id, known_s in arrivals:
            arrival_s = known_s or _UNKNOWN_S
            if begin < (arrival_s, request_id) < end:
                candidates[request_id] = min(arrival_s, candidates.get(request_id, arrival_s))
        if limit is not None and len(candidates) > 2 * limit:
            oldest = _by_arrival(candidates)[:limit]
            candidates, end = {request_id: arrival_s for arrival_s, request_id in oldest}, oldest[-1]
    return _by_arrival(candidates)[:limit], total


def _by_arrival(arrivals: dict[str, float]) -> list[tuple[float, str]]:
    return sorted((arrival_s, request_id) for request_id, arrival_s in arrivals.items())


def _instances(state: ReportedCluster, request: admin_pb2.ListRequestsRequest) -> list[str]:
    return [request.instance_id] if request.instance_id else sorted(state.view().instances)


def _page_start(request: admin_pb2.ListRequestsRequest, kind: type[T]) -> tuple[T, str] | None:
    """Return the position of the last request of the previous page; None: there is none."""
    if not request.page_token:
        return None
    try:
        token = msgspec.json.decode(base64.urlsafe_b64decode(request.page_token), type=_Token)
    except (binascii.Error, ValueError) as error:
        raise _invalid("page_token: must be the next_page_token of a reply") from error
    listing = (request.instance_id, request.phase, request.order)
    if (token.instance_id, token.phase, token.order) != listing or not isinstance(token.after, kind):
        raise _invalid("page_token: belongs to a listing with another instance_id, phase or order")
    return token.after, token.request_id


def _invalid(details: str) -> AdminError:
    return AdminError(grpc.StatusCode.INVALID_ARGUMENT, details)
