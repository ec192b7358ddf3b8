"""A real etcd that asks for certificates: services keep to their keys, others get nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.security.authority import Authority
from tailrace.security.etcd_rights import etcd_rights
from tailrace.security.roles import MEMBERS, Identity, Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.etcd import EtcdTls, LocalEtcd, local_etcd
from tailrace.store.client import EtcdClient, StoreUnavailable
from tailrace.store.endpoints import parse_endpoints
from tailrace.store.etcd_roles import apply_rights
from tailrace.store.registration import register
from tailrace.store.store import Store
from tests.ports import free_port
from tests.security.conftest import transport

CLUSTER = "c"

# Written by the service of the role in its life, and by no other.
OWN = {
    Role.FRONTEND: ["services/frontend/f"],
    Role.MONITOR: ["services/monitor/m", "leader/monitor"],
    Role.MIGRATION: ["services/migration/m", "leader/migration"],
    Role.SCHEDULER: [
        "services/scheduler/s",
        "leader/scheduler",
        "pools/w",
        "stages",
        "policy",
        "slo",
        "drains/w",
        "rollouts/m",
    ],
    Role.WORKER: ["instances/w", "profiles/p", "profiling/p"],
}


@dataclass
class Guarded:
    authority: Authority
    etcd: LocalEtcd
    changes: list[str]

    async def store(self, own: Transport) -> Store:
        return await Store.connect([self.etcd.endpoint], CLUSTER, own)


@pytest.fixture
async def guarded(authority: Authority, tmp_path: Path) -> AsyncIterator[Guarded]:
    folder = authority.issue(Identity(Role.ETCD, "etcd"), hosts=["127.0.0.1"]).folder
    tls = EtcdTls(folder, free_port())
    async with local_etcd(tmp_path / "etcd", tls=tls) as etcd:
        client = EtcdClient(parse_endpoints([etcd.endpoint]), transport(authority, Role.ETCD_ROOT))
        changes = await apply_rights(client, etcd_rights(CLUSTER), CLUSTER)
        assert await apply_rights(client, etcd_rights(CLUSTER), CLUSTER) == []
        await client.close()
        yield Guarded(authority, etcd, changes)


async def test_each_role_writes_its_own_keys_and_no_others(guarded: Guarded) -> None:
    assert {*OWN} == MEMBERS
    async with AsyncExitStack() as stack:
        stores = {}
        for role in OWN:
            stores[role] = await guarded.store(transport(guarded.authority, role))
            stack.push_async_callback(stores[role].close)
        for role, keys in OWN.items():
            for key in keys:
                for other, store in stores.items():
                    if other is role:
                        await store.put(key, role.value.encode())
                        continue
                    with pytest.raises(StoreUnavailable, match="permission denied"):
                        await store.put(key, b"not mine")
                # Everybody follows the whole cluster.
                assert await stores[Role.FRONTEND].get(key) == role.value.encode()


async def test_a_service_lives_there_as_in_an_open_one(guarded: Guarded) -> None:
    """Registration, watch, lease and withdrawal."""
    store = await guarded.store(transport(guarded.authority, Role.WORKER))
    other = await guarded.store(transport(guarded.authority, Role.SCHEDULER))
    async with asyncio.timeout(30):
        seen = other.watch_prefix("")
        registration = await register(store, "instances/w", b"here", 5.0)
        async for values in seen:
            if values.get("instances/w") == b"here":
                break
        await registration._renew()
        await registration.withdraw()
        async for values in seen:
            if "instances/w" not in values:
                assert values["withdrawn/instances/w"] == b"here"
                break
        await seen.aclose()
    await other.delete("drains/w")
    await store.close()
    await other.close()


async def test_a_cluster_does_not_reach_into_another(guarded: Guarded) -> None:
    own = transport(guarded.authority, Role.SCHEDULER)
    client = EtcdClient(parse_endpoints([guarded.etcd.endpoint]), own)
    foreign = Store(client, "another")
    with pytest.raises(StoreUnavailable, match="permission denied"):
        await foreign.get("policy")
    await client.close()


async def test_new_certificates_take_over_while_a_watch_goes_on(guarded: Guarded) -> None:
    own = transport(guarded.authority, Role.SCHEDULER)
    store = await guarded.store(own)
    async with asyncio.timeout(30):
        seen = store.watch_prefix("pools/")
        assert await anext(seen) == {}
        before = own.version
        guarded.authority.rotate()
        await store.put("pools/w", b"prefill")
        assert own.version > before
        assert await anext(seen) == {"pools/w": b"prefill"}
        await seen.aclose()
    await store.close()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN, Role.TELEMETRY])
async def test_operators_are_no_users_of_etcd(guarded: Guarded, role: Role) -> None:
    client = EtcdClient(parse_endpoints([guarded.etcd.endpoint]), transport(guarded.authority, role))
    with pytest.raises(StoreUnavailable, match=r"permission denied|user name not found"):
        await Store(client, CLUSTER).get("policy")
    await client.close()


async def test_others_get_nothing(guarded: Guarded, foreign: Authority) -> None:
    for own in (PLAIN, transport(foreign, Role.SCHEDULER)):
        client = EtcdClient(parse_endpoints([guarded.etcd.endpoint]), own)
        with pytest.raises(StoreUnavailable):
            await Store(client, CLUSTER).get("policy")
        await client.close()
