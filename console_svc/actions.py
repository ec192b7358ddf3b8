"""What an operator does through the console: each action is one call of the admin API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import msgspec

from tailrace.cli.plain import enum_word, enum_words
from tailrace.messages import objectives_message, slo_of
from tailrace.policy.parameters import ParameterError
from tailrace.slo import assignments, read_objectives
from tailrace.v1.admin_pb2 import (
    AdminMigrateRequest,
    DrainRequest,
    SetPolicyRequest,
    SetPoolRequest,
    SetShadowRequest,
    SetSloRequest,
    SetStagesRequest,
)
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.types_pb2 import (
    MIGRATION_STATE_COMMITTED,
    POOL_UNSPECIFIED,
    MigrationState,
    Pool,
    Stage,
)

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

_CALL_TIMEOUT_S: Final = 10.0
_MIGRATE_TIMEOUT_S: Final = 120.0
_NO_POOL: Final = "none"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Parameters = Annotated[dict[Name, Text], msgspec.Meta(max_length=100)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Invalid(Exception):
    """The admin API was not called; the message names the field and says why."""


class Refused(Exception):
    """The action was carried out to no effect; the message says why."""


class Action(Protocol):
    """What is asked for, as a struct. Its class has the name of the admin API's method."""

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """Return what was done. Raise grpc.aio.AioRpcError, Invalid or Refused."""


class SetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make a policy the active one. `parameters`: by name; the others get their defaults."""

    name: Name
    parameters: Parameters = {}

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action."""
        request = SetPolicyRequest(name=self.name, parameters=self.parameters)
        reply = await stub.SetPolicy(request, timeout=_CALL_TIMEOUT_S)
        return f"{self.name} is the policy; before: {reply.previous}"


class SetShadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask a policy beside the active one, and count its decisions; an empty name ends it."""

    name: Text
    parameters: Parameters = {}

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action."""
        request = SetShadowRequest(name=self.name, parameters=self.parameters)
        reply = await stub.SetShadow(request, timeout=_CALL_TIMEOUT_S)
        return f"the shadow is {self.name or 'none'}; before: {reply.previous or 'none'}"


class SetSlo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change objectives, as `tailrace set slo` takes them; those that are not given stay, 0 removes one."""

    objectives: Annotated[dict[Name, Text], msgspec.Meta(min_length=1, max_length=10)]

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action."""
        try:
            given = read_objectives(self.objectives)
        except ParameterError as error:
            raise Invalid(str(error)) from error
        request = SetSloRequest(slo=objectives_message(given))
        reply = await stub.SetSlo(request, timeout=_CALL_TIMEOUT_S)
        return f"SLOs: {assignments(slo_of(reply.slo))}; before: {assignments(slo_of(reply.previous))}"


class SetPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Put an instance into a pool, or with `none` out of its pool."""

    instance: Name
    pool: Name

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action."""
        pools = {_NO_POOL: POOL_UNSPECIFIED, **enum_words(Pool.DESCRIPTOR)}
        if self.pool not in pools:
            raise Invalid(f"pool: there is no {self.pool!r}; there are: {', '.join(pools)}")
        request = SetPoolRequest(instance_id=self.instance, pool=Pool.ValueType(pools[self.pool]))
        reply = await stub.SetPool(request, timeout=_CALL_TIMEOUT_S)
        before = enum_word(Pool.DESCRIPTOR, reply.previous) or _NO_POOL
        return f"pool of {self.instance}: {self.pool}; before: {before}"


class GivenStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths [lo, hi) in tokens, and the instances that serve them."""

    lo: Tokens
    hi: Tokens
    instance_ids: Annotated[list[Name], msgspec.Meta(max_length=10_000)]


class SetStages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace all stages; none removes them."""

    stages: Annotated[list[GivenStage], msgspec.Meta(max_length=1_000)]

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action."""
        stages = [Stage(lo=each.lo, hi=each.hi, instance_ids=each.instance_ids) for each in self.stages]
        await stub.SetStages(SetStagesRequest(stages=stages), timeout=_CALL_TIMEOUT_S)
        return f"stages: {len(stages)}"


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hand over everything on an instance and place nothing new there; `undrain`: take it back."""

    instance: Name
    undrain: bool = False

    async def carry_out(self, stub: AdminAsyncStub) -> str:
        """See Action: a drain goes on by itself."""
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
        """See Action. Raise Refused if the request did not move."""
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


ACTIONS: Final[Mapping[str, type[Action]]] = MappingProxyType(
    {
        "policy": SetPolicy,
        "shadow": SetShadow,
        "slo": SetSlo,
        "pool": SetPool,
        "stages": SetStages,
        "drain": Drain,
        "migrate": Migrate,
    }
)
"""The actions by their names in URLs."""


def read_action(kind: type[Action], body: bytes) -> Action:
    """Return the action that a body asks for. Raise Invalid."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        # "... - at `$.stages[0].lo`": like the admin API, the field first.
        reason, _, place = str(error).partition(" - at `$.")
        raise Invalid(f"{place.rstrip('`')}: {reason}" if place else reason) from error
    except msgspec.DecodeError as error:
        raise Invalid(f"no JSON: {error}") from error
