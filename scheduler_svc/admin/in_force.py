"""Report a setting as changed only once every scheduler goes by it."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.forward import KIND
from tailrace.records import ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2
from tailrace.v1.admin_pb2_grpc import AdminStub

FOLLOW_S: Final = 5.0
_POLL_S: Final = 0.02
# A scheduler whose event loop is held up, by a policy for instance, does not answer either.
_ANSWER_S: Final = 1.0


class InForce:
    """Wait for what was written to etcd to arrive here, and at the other schedulers."""

    def __init__(self, service_id: str, members: Membership, channels: Channels) -> None:
        self._service_id = service_id
        self._members = members
        self._channels = channels

    async def wait(self, what: str, revision: int) -> None:
        """Return once this scheduler and the others have read what a write of this revision wrote.

        Not at the present revision of etcd: another cluster's writes raise it, and no watch here shows them.

        A scheduler that does not answer places nothing, and is not waited for. Raise AdminError if one that
        answers has not got there within FOLLOW_S.
        """
        lagging = self._service_id
        try:
            async with asyncio.timeout(FOLLOW_S):
                while self._members.revision < revision:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                for (kind, lagging), record in list(self._members.services.items()):
                    if kind == KIND and lagging != self._service_id:
                        await self._followed(record, revision)
        except TimeoutError:
            raise AdminError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"{what} is in etcd, but scheduler {lagging} has not followed it within {FOLLOW_S:g} s",
            ) from None

    async def _followed(self, scheduler: ServiceRecord, revision: int) -> None:
        stub = AdminStub(self._channels.get(scheduler.address, Role.SCHEDULER))
        while True:
            try:
                call = stub.ListServices(admin_pb2.ListServicesRequest(), timeout=_ANSWER_S)
                reply = decoded(await call, scheduler.address)
            except grpc.aio.AioRpcError:
                return
            if reply.revision >= revision:
                return
            await asyncio.sleep(_POLL_S)
