"""What an operator can do from the page: each action is one call of the admin API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from tailrace.cli.plain import enum_word
from tailrace.v1.admin_pb2 import AdminMigrateRequest, DrainRequest, SetPolicyRequest
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.types_pb2 import MIGRATION_STATE_COMMITTED, MigrationState

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

_CALL_TIMEOUT_S: Final = 10.0
_MIGRATE_TIMEOUT_S: Final = 120.0

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Text = Annotated[str, msgspec.Meta(max_length=500)]


class Refused(Exception):
    """The action was carried out to no effect; the message says why."""


class SetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make a policy the active one. `parameters`: by name; the others get their defaults."""

    name: Name
    parameters: Annotated[dict[Name, Text], msgspec.Meta(max_length=100)] = {}

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """Return what was done. Raise grpc.aio.AioRpcError."""
        request = SetPolicyRequest(name=self.name, parameters=self.parameters)
        reply = await stub.SetPolicy(request, timeout=_CALL_TIMEOUT_S)
        return f"{self.name} is the policy; before: {reply.previous}"


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hand over everything on an instance and place nothing new there; `undrain`: take it back."""

    instance: Name
    undrain: bool = False

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """Return what was done: a drain goes on by itself. Raise grpc.aio.AioRpcError."""
        call = stub.Drain(
            DrainRequest(instance_id=self.instance, undrain=self.undrain), timeout=_CALL_TIMEOUT_S
        )
        async for event in call:
            # Who stops listening stops no drain.
            call.cancel()
            if self.undrain:
                return f"{self.instance} takes new requests again"
            return event.message or f"{self.instance} drains: {event.remaining} requests left"
        raise Refused("the admin API said nothing of it")


class Migrate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Move a running request to another instance."""

    request: Name
    target: Name

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """Return how it went. Raise grpc.aio.AioRpcError, or Refused if the request did not move."""
        message = AdminMigrateRequest(
            request_id=self.request, target_instance_id=self.target, reason="operator"
        )
        record = MigrationRecord()
        async for event in stub.Migrate(message, timeout=_MIGRATE_TIMEOUT_S):
            record = event
        if record.state != MIGRATION_STATE_COMMITTED:
            state = enum_word(MigrationState.DESCRIPTOR, record.state) or "not begun"
            raise Refused(f"the request did not move ({state}): {record.error or 'no reason given'}")
        return f"{record.request_id} is on {record.target_instance_id}, paused {record.pause_ms:.1f} ms"


ACTIONS: Final[Mapping[str, type[SetPolicy] | type[Drain] | type[Migrate]]] = MappingProxyType(
    {"policy": SetPolicy, "drain": Drain, "migrate": Migrate}
)
"""The actions by their names in URLs."""
