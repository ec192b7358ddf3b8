"""A real etcd with certificates: services can write only their own keys, others have no access."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.address import parse_endpoints
from tailrace.security.authority import Authority
from tailrace.security.etcd_rights import etcd_rights
from tailrace.security.roles import MEMBERS, Identity, Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.etcd import EtcdTls, LocalEtcd, local_etcd
from tailrace.store.client import EtcdClient, StoreUnavailable
from tailrace.store.etcd_roles import apply_rights
from tailrace.store.registration import register
from tailrace.store.store import Store
from tests.ports import free_port
from tests.security.conftest import transport

CLUSTER = "c"

# Keys that only services of the role write.
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
class SecuredEtcd:
    authority: Authority
    etcd: LocalEtcd
    changes: list[str]

    async def store(self, own: Transport) -> Store:
        return await Store.connect([self.etcd.endpoint], CLUSTER, own)


@pytest.fixture
async def secured_etcd(authority: Authority, tmp_path: Path) -> AsyncIterator[SecuredEtcd]:
    folder = authority.issue(Identity(Role.ETCD, "etcd"), hosts=["127.0.0.1"]).folder
    tls = EtcdTls(folder, free_port())
    async with local_etcd(tmp_path / "etcd", tls=tls) as etcd:
        client = EtcdClient(parse_endpoints([etcd.endpoint]), transport(authority, Role.ETCD_ROOT))
        changes = await apply_rights(client, etcd_rights(CLUSTER), CLUSTER)
        assert await apply_rights(client, etcd_rights(CLUSTER), CLUSTER) == []
        await client.close()
        yield SecuredEtcd(authority, etcd, changes)


async def test_each_role_writes_its_own_keys_and_no_others(secured_etcd: SecuredEtcd) -> None:
    assert {*OWN} == MEMBERS
    async with AsyncExitStack() as stack:
        stores = {}
        for role in OWN:
            stores[role] = await secured_etcd.store(transport(secured_etcd.authority, role))
            stack.push_async_callback(stores[role].close)
        for role, keys in OWN.items():
            for key in keys:
                for other, store in stores.items():
                    if other is role:
                        await store.put(key, role.value.encode())
                        continue
                    with pytest.raises(StoreUnavailable, match="permission denied"):
                        await store.put(key, b"not mine")
                # Every role can read all keys of the cluster.
                assert await stores[Role.FRONTEND].get(key) == role.value.encode()


async def test_service_lifecycle_with_access_control(secured_etcd: SecuredEtcd) -> None:
    """Registration, watch, lease and withdrawal work."""
    store = await secured_etcd.store(transport(secured_etcd.authority, Role.WORKER))
    other = await secured_etcd.store(transport(secured_etcd.authority, Role.SCHEDULER))
    async with asyncio.timeout(30):
        watch = other.watch_prefix("")
        registration = await register(store, "instances/w", b"here", 5.0)
        async for values in watch:
            if values.get("instances/w") == b"here":
                break
        await registration._renew()
        await registration.withdraw()
        async for values in watch:
            if "instances/w" not in values:
                assert values["withdrawn/instances/w"] == b"here"
                break
        await watch.aclose()
    await other.delete("drains/w")
    await store.close()
    await other.close()


async def test_cluster_cannot_access_another_clusters_keys(secured_etcd: SecuredEtcd) -> None:
    own = transport(secured_etcd.authority, Role.SCHEDULER)
    client = EtcdClient(parse_endpoints([secured_etcd.etcd.endpoint]), own)
    foreign = Store(client, "another")
    with pytest.raises(StoreUnavailable, match="permission denied"):
        await foreign.get("policy")
    await client.close()


async def test_watch_survives_certificate_rotation(secured_etcd: SecuredEtcd) -> None:
    own = transport(secured_etcd.authority, Role.SCHEDULER)
    store = await secured_etcd.store(own)
    async with asyncio.timeout(30):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        before = own.version
        secured_etcd.authority.rotate()
        await store.put("pools/w", b"prefill")
        assert own.version > before
        assert await anext(watch) == {"pools/w": b"prefill"}
        await watch.aclose()
    await store.close()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN, Role.TELEMETRY])
async def test_operators_have_no_access_to_etcd(secured_etcd: SecuredEtcd, role: Role) -> None:
    client = EtcdClient(
        parse_endpoints([secured_etcd.etcd.endpoint]), transport(secured_etcd.authority, role)
    )
    with pytest.raises(StoreUnavailable, match=r"permission denied|user name not found"):
        await Store(client, CLUSTER).get("policy")
    await client.close()


async def test_etcd_refuses_clients_without_a_valid_certificate(
    secured_etcd: SecuredEtcd, foreign: Authority
) -> None:
    for own in (PLAIN, transport(foreign, Role.SCHEDULER)):
        client = EtcdClient(parse_endpoints([secured_etcd.etcd.endpoint]), own)
        with pytest.raises(StoreUnavailable):
            await Store(client, CLUSTER).get("policy")
        await client.close()
