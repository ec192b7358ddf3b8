"""Writes go to the leader: a standby passes them on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.security.audit import ON_BEHALF_OF, caller_name
from tailrace.security.handlers import Context
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.store.membership import Membership
from tailrace.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

KIND: Final = "scheduler"
FORWARDED: Final = ("tailrace-forwarded", "1")
"""Metadata of a call that a standby passed on; it is not passed on again."""


def forwarding(context: Context) -> tuple[tuple[str, str], ...]:
    """Metadata to pass a call on with: whom it is for, if that is known."""
    who = caller_name(context)
    return (FORWARDED, (ON_BEHALF_OF, who)) if who else (FORWARDED,)


class LeaderRoute:
    """Where a write is to be done."""

    def __init__(
        self, service_id: str, members: Membership, channels: Channels, leading: asyncio.Event
    ) -> None:
        self._service_id = service_id
        self._members = members
        self._channels = channels
        self._leading = leading

    def elsewhere(self, metadata: grpc.aio.Metadata | None) -> AdminAsyncStub | None:
        """The leader's admin API; None: it is us. Raises Refused when nobody is known to lead."""
        if self._leading.is_set():
            return None
        leader = self._members.leaders.get(KIND)
        forwarded = metadata is not None and FORWARDED in tuple(metadata)
        if leader is None or leader.service_id == self._service_id or forwarded:
            named = leader.service_id if leader is not None else "none"
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                f"scheduler {self._service_id} does not lead (leader known here: {named}); "
                "try again in some seconds",
            )
        return AdminStub(self._channels.get(leader.address, Role.SCHEDULER))
