"""The tenants behind vLLM's Rust API server, which knows none: an edge checks keys and limits, and says in a
request's id whose it is. (Behind the Python app, api_server/tenants.py does both.)

That id is believed because vllm-rs asks for the key of edges, which is in the same file as those of users.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

import grpc

from frontend_svc.admission import Readiness, Refusal, Refused
from frontend_svc.streams import Stream
from tailrace.request_ids import read_name_at_edge
from tailrace.service.server import Servicer
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import Share, Tenant
from tailrace.v1 import usage_pb2, usage_pb2_grpc
from tailrace.wire.requests import OfTenant, RequestHead

SERVICE: Final = "tailrace.v1.Usage"
# Between two reports to an edge, if there is anything new.
_REPORT_S: Final = 0.25

Context = grpc.aio.ServicerContext[usage_pb2.WatchUsageRequest, usage_pb2.UsageReport]

_NO_EDGE: Final = Refusal(401, "This request came by no edge.")
_REVOKED: Final = Refusal(401, "The key of this request is not valid any more.")
_MEDIA: Final = Refusal(
    400, "With API keys, vllm-rs takes no images or other media: they would have no salt."
)


class Sender(NamedTuple):
    """Whose request it is."""

    tenant: Tenant
    # vLLM's name of the request without what the edge added.
    name: str

    def share(self) -> Share:
        """Return its tenant's share among waiting ones."""
        return Share(self.tenant.name, self.tenant.weight)

    def fields(self, head: RequestHead) -> OfTenant:
        """Return what the engines get instead of the client's choice."""
        return OfTenant(self.tenant.cache_salt(head.cache_salt), self.tenant.priority)


class TenantUsage:
    """Know the tenants of requests, and count what they use."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self._by_handle: dict[int, str] = {}
        # Since this process began.
        self.tokens: Counter[str] = Counter()
        # Returns the tenants of which too many requests wait for their turns.
        self.full: Callable[[], list[str]] = list

    def sender(self, head: RequestHead) -> Sender:
        """Return whose request it is. Raise Refused."""
        name, key_id = read_name_at_edge(head.external_req_id or "")
        if not key_id:
            raise Refused(_NO_EDGE)
        tenant = self._keys.index().tenant_of(key_id)
        if tenant is None:
            raise Refused(_REVOKED)
        if head.media:
            raise Refused(_MEDIA)
        return Sender(tenant, name)

    def begin(self, stream: Stream, tenant: Tenant) -> None:
        """Count what this stream uses for its tenant."""
        self._by_handle[stream.handle] = tenant.name

    def end(self, stream: Stream) -> None:
        """Charge what a stream has used: nothing if no instance ever had it. Ending it twice is allowed."""
        tenant = self._by_handle.pop(stream.handle, None)
        if tenant is not None and (stream.accepted or stream.owner is not None or stream.left_engine):
            self.tokens[tenant] += stream.prompt_tokens + stream.accepted


class UsageServicer(usage_pb2_grpc.UsageServicer):
    """Implement tailrace.v1.Usage; see usage.proto."""

    def __init__(self, usage: TenantUsage | None, readiness: Readiness, knows_tenants: bool) -> None:
        """`usage`: None without keys, and where the API server counts."""
        self._usage = usage
        self._knows_tenants = knows_tenants
        self._readiness = readiness
        self._run = uuid.uuid4().hex

    async def Watch(
        self, request: usage_pb2.WatchUsageRequest, context: Context
    ) -> AsyncIterator[usage_pb2.UsageReport]:
        """Report what tenants have used, until the caller leaves."""
        sent: usage_pb2.UsageReport | None = None
        while True:
            report = usage_pb2.UsageReport(run=self._run, knows_tenants=self._knows_tenants)
            if (usage := self._usage) is not None:
                report.tokens.update(usage.tokens)
                report.full_tenants.extend(usage.full())
            report.context_tokens = self._readiness.context_tokens()
            if (refusal := self._readiness.refusal) is not None:
                report.refusal_status, report.refusal_message = refusal.status, refusal.message
            if (unready := self._readiness.unready) is not None:
                report.unready = unready.message
            if report != sent:
                yield report
                sent = report
            await asyncio.sleep(_REPORT_S)


def usage_servicer(usage: TenantUsage | None, readiness: Readiness, knows_tenants: bool) -> Servicer:
    """Return the servicer for the front end's gRPC server."""
    servicer = UsageServicer(usage, readiness, knows_tenants)
    return Servicer(usage_pb2_grpc.add_UsageServicer_to_server, servicer, SERVICE)
