"""Name a request by any part of its id that only it has."""

from __future__ import annotations

from tailrace.cli.admin import CALL_TIMEOUT_S, Admin
from tailrace.cli.errors import UsageProblem
from tailrace.v1.admin_pb2 import ListRequestsRequest

_SHOWN = 3


def full_request_id(admin: Admin, text: str) -> str:
    """The id of the one running request that `text` names.

    Returns `text` itself when no running request has it: the server knows best what to say then. Raises
    UsageProblem when several have it, and grpc.RpcError.
    """
    reply = admin.stub.ListRequests(ListRequestsRequest(), timeout=CALL_TIMEOUT_S)
    ids = [request.request_id for request in reply.requests]
    if text in ids:
        return text
    matches = sorted(name for name in ids if text in name)
    if len(matches) > 1:
        more = f" and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
        shown = ", ".join(matches[:_SHOWN])
        raise UsageProblem(f"{text!r} is part of several request ids: {shown}{more}; give more of it")
    return matches[0] if matches else text
