"""What the admin API does to a fleet, each call with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from tailrace.cluster import Pool
from tailrace.policy.parameters import format_value
from tailrace.policy.registry import all_parameters
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, types_pb2
from tests.waiting import WAIT_S

NO_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType({})

POLL_S: Final = 0.05
_POOLS: Final = {pool: getattr(types_pb2, f"POOL_{pool.name}") for pool in Pool}


def in_effect(
    policies: Iterable[admin_pb2.PolicyInfo], name: str, parameters: Mapping[str, str] = NO_PARAMETERS
) -> bool:
    """Return whether the policy of this name in full is active, with these parameters and no others."""
    expected = {key: format_value(value) for key, value in all_parameters(name, parameters).items()}
    active = next((each for each in policies if each.active), None)
    return (
        active is not None
        and active.name == name.split()[0]
        and {each.name: each.value for each in active.parameters} == expected
    )


class ControlledFleet:
    """A running fleet with its admin API."""

    def __init__(self, admin: admin_pb2_grpc.AdminAsyncStub) -> None:
        self.admin = admin

    async def instances(self) -> Mapping[str, admin_pb2.InstanceInfo]:
        """Return the instances by ID, as the scheduler sees them."""
        reply = await self.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        return {info.instance_id: info for info in reply.instances}

    async def set_policy(self, name: str, parameters: Mapping[str, str] = NO_PARAMETERS) -> None:
        """Run `tailrace set policy NAME key=value ...`; return once it is in effect."""
        request = admin_pb2.SetPolicyRequest(name=name, parameters=parameters)
        await self.admin.SetPolicy(request, timeout=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while not in_effect(await self._policies(), name, parameters):  # noqa: ASYNC110 - it is polled
                await asyncio.sleep(POLL_S)

    async def _policies(self) -> Sequence[admin_pb2.PolicyInfo]:
        reply = await self.admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S)
        return reply.policies

    async def set_stages(self, stages: Sequence[types_pb2.Stage]) -> None:
        """Run `tailrace set stages`."""
        await self.admin.SetStages(admin_pb2.SetStagesRequest(stages=stages), timeout=WAIT_S)

    async def set_pool(self, name: str, pool: Pool | None) -> None:
        """Run `tailrace set pool` for an instance; None: remove it from all pools."""
        number = types_pb2.POOL_UNSPECIFIED if pool is None else _POOLS[pool]
        await self.admin.SetPool(admin_pb2.SetPoolRequest(instance_id=name, pool=number), timeout=WAIT_S)

    async def migrations(self) -> list[migration_pb2.MigrationRecord]:
        """Return the migrations that the migration service still lists, committed or not, newest first."""
        reply = await self.admin.ListMigrations(migration_pb2.ListMigrationsRequest(), timeout=WAIT_S)
        return list(reply.migrations)
