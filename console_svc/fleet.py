"""Ask the admin API: once a second for all viewers together while there are any, and for what one asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import msgspec

from console_svc.life import life
from console_svc.snapshot import MIGRATIONS_MAX, REQUESTS_MAX, Sample, snapshot
from tailrace.cli.admin import CALL_TIMEOUT_S, CHANNEL_OPTIONS, AdminAddress
from tailrace.cli.plain import JsonValue, to_plain, to_plain_list
from tailrace.security.renewed_channel import CLOSE_WHEN_IDLE, RenewedChannel
from tailrace.security.roles import Role
from tailrace.security.transport import TlsTransport
from tailrace.service.channels import decoded
from tailrace.v1 import admin_pb2 as admin
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.migration_pb2 import ListMigrationsRequest, MigrationRecord

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

Reply = TypeVar("Reply")

_INTERVAL_S: Final = 1.0
_PAGE: Final = 1_000
# What changes rarely is asked for so seldom.
_SLOW_S: Final = 5.0


class WatchedFleet:
    """The fleet behind one cluster's admin API. Run `poll` as long as it is used."""

    def __init__(
        self, address: AdminAddress, session: Callable[[WatchedFleet], dict[str, JsonValue]]
    ) -> None:
        """`session`: returns what each snapshot says of the console."""
        transport = self._transport = address.transport
        options = [*CHANNEL_OPTIONS, CLOSE_WHEN_IDLE]
        self._address = address
        self._moves = 0
        self._channel = RenewedChannel(
            lambda: transport.channel(self._address.target, Role.SCHEDULER, options),
            lambda: transport.version + self._moves,
        )
        self._session = session
        self._viewers = 0
        self._watched = asyncio.Event()
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._encoded = b""
        self._closed = False
        self._last: Sample | None = None
        self._slow_s = 0.0

    @property
    def stub(self) -> AdminAsyncStub:
        """Return the admin API; do not keep it across calls."""
        return AdminStub(self._channel.get())

    @property
    def who(self) -> str:
        """Return as whom the console acts: ROLE/NAME of its certificate, or `local` without one."""
        transport = self._transport
        if not isinstance(transport, TlsTransport):
            return "local"
        return str(transport.folder.current().identity)

    @property
    def may_act(self) -> bool:
        """Return whether the certificate, if there is one, allows changes."""
        transport = self._transport
        return (
            not isinstance(transport, TlsTransport)
            or transport.folder.current().identity.role is not Role.VIEWER
        )

    @property
    def address(self) -> str:
        """Return where the admin API is, as its user wrote it."""
        return self._address.text

    def move(self, address: AdminAddress) -> None:
        """Use another address of the same transport from the next call on."""
        if address != self._address:
            self._address = address
            self._moves += 1

    async def close(self) -> None:
        """Close the connections and end the viewers' snapshots. `poll` must have ended."""
        self._closed = True
        self._wake()
        await self._channel.close()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Poll during the block; yield the snapshots, of which a slow viewer misses some, until it is
        closed."""
        self._viewers += 1
        self._watched.set()
        try:
            yield self._snapshots()
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._watched.clear()

    async def _snapshots(self) -> AsyncIterator[bytes]:
        while not self._closed:
            await asyncio.shield(self._next)
            if not self._closed:
                yield self._encoded

    def _wake(self) -> None:
        waiting, self._next = self._next, asyncio.get_running_loop().create_future()
        waiting.set_result(None)

    def ask_again(self) -> None:
        """Ask with the next poll for what changes rarely, too."""
        self._slow_s = 0.0

    async def poll(self) -> None:
        """Poll while somebody watches, until cancelled."""
        while True:
            await self._watched.wait()
            began_s = time.monotonic()
            sample = await self._sample()
            self._encoded = msgspec.json.encode(snapshot(sample, self._last, self._session(self)))
            self._last = sample
            self._wake()
            await asyncio.sleep(max(_INTERVAL_S / 2, began_s + _INTERVAL_S - time.monotonic()))

    async def _sample(self) -> Sample:
        problems: dict[str, str] = {}

        async def ask(name: str, call: Awaitable[Reply], otherwise: Reply) -> Reply:
            try:
                return decoded(await call, self.address)
            except grpc.aio.AioRpcError as error:
                problems[name] = reason_of(error)
                return otherwise

        stub, last = self.stub, self._last
        timeout = CALL_TIMEOUT_S
        instances, (requests, total), migrations = await asyncio.gather(
            ask(
                "ListInstances",
                stub.ListInstances(admin.ListInstancesRequest(), timeout=timeout),
                admin.ListInstancesReply(),
            ),
            ask("ListRequests", self._requests(), ((), 0)),
            ask("ListMigrations", self._migrations("", MIGRATIONS_MAX), ()),
        )
        at_s = time.time()
        if last is None or time.monotonic() >= self._slow_s or last.problems:
            self._slow_s = time.monotonic() + _SLOW_S
            policies, services, stages, slo = await asyncio.gather(
                ask(
                    "ListPolicies",
                    stub.ListPolicies(admin.ListPoliciesRequest(), timeout=timeout),
                    admin.ListPoliciesReply(),
                ),
                ask(
                    "ListServices",
                    stub.ListServices(admin.ListServicesRequest(), timeout=timeout),
                    admin.ListServicesReply(),
                ),
                ask(
                    "ListStages",
                    stub.ListStages(admin.ListStagesRequest(), timeout=timeout),
                    admin.ListStagesReply(),
                ),
                ask("GetSlo", stub.GetSlo(admin.GetSloRequest(), timeout=timeout), admin.GetSloReply()),
            )
            last = Sample(
                at_s,
                policies=policies.policies,
                services=services.services,
                stages=stages.stages,
                slo=slo.slo,
            )
        return Sample(
            at_s,
            instances.instances,
            instances.recent,
            requests,
            total,
            migrations,
            last.policies,
            last.services,
            last.stages,
            last.slo,
            problems,
        )

    async def _requests(self) -> tuple[Sequence[admin.RequestInfo], int]:
        """Return the first REQUESTS_MAX running requests, and how many there are."""
        found: list[admin.RequestInfo] = []
        token = ""
        while True:
            request = admin.ListRequestsRequest(page_size=_PAGE, page_token=token)
            reply = decoded(await self.stub.ListRequests(request, timeout=CALL_TIMEOUT_S), self.address)
            found += reply.requests
            token = reply.next_page_token
            if not token or len(found) >= REQUESTS_MAX:
                return found, reply.total_size

    async def _migrations(self, request_id: str, limit: int) -> Sequence[MigrationRecord]:
        request = ListMigrationsRequest(request_id=request_id, limit=limit)
        reply = await self.stub.ListMigrations(request, timeout=CALL_TIMEOUT_S)
        return decoded(reply, self.address).migrations

    async def life(self, request_id: str) -> dict[str, JsonValue]:
        """Return one request's life. Raise grpc.aio.AioRpcError if neither its trace nor its migrations can
        be had."""
        trace, migrations = await asyncio.gather(
            self.stub.GetTrace(admin.GetTraceRequest(id=request_id), timeout=CALL_TIMEOUT_S),
            self._migrations(request_id, MIGRATIONS_MAX),
            return_exceptions=True,
        )
        for result in (trace, migrations):
            if isinstance(result, BaseException) and not isinstance(result, grpc.aio.AioRpcError):
                raise result
        running = self._last.requests if self._last is not None else ()
        request = next((row for row in running if row.request_id == request_id), None)
        if isinstance(trace, BaseException) and isinstance(migrations, BaseException) and request is None:
            raise trace
        found = life(
            request_id,
            request,
            () if isinstance(migrations, BaseException) else migrations,
            b"" if isinstance(trace, BaseException) else decoded(trace, self.address).traces_data,
        )
        found["problem"] = reason_of(trace) if isinstance(trace, grpc.aio.AioRpcError) else ""
        return found

    async def policies(self) -> dict[str, JsonValue]:
        """Return the policies with their parameters, and the shadow with its counts."""
        policies, shadow = await asyncio.gather(
            self.stub.ListPolicies(admin.ListPoliciesRequest(), timeout=CALL_TIMEOUT_S),
            self.stub.GetShadow(admin.GetShadowRequest(), timeout=CALL_TIMEOUT_S),
        )
        counted = decoded(shadow, self.address)
        plain = to_plain(counted)
        plain["parameters"] = dict(counted.parameters)
        return {"policies": to_plain_list(decoded(policies, self.address).policies), "shadow": plain}


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed, for people."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the admin API did not respond in time"
    return (error.details() or error.code().name).strip().rstrip(".")
