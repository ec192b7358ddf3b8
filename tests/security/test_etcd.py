"""A real etcd with certificates: services can write only their own keys, others have no access."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import psutil
import pytest

from tailrace.address import parse_endpoints
from tailrace.security.authority import Authority
from tailrace.security.credentials import Credentials, read_credentials
from tailrace.security.roles import MEMBERS, Identity, Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.probe import Unhealthy, check_http
from tailrace.store.client import EtcdClient, StoreUnavailable
from tailrace.store.etcd_roles import apply_rights, etcd_rights
from tailrace.store.registration import register
from tailrace.store.store import Store
from tests.harness.local_etcd import LocalEtcd, local_etcd
from tests.ports import free_port
from tests.security.conftest import transport
from tests.waiting import WAIT_S

CLUSTER = "c"

# Keys that only services of the role write.
OWN = {
    Role.EDGE: ["services/edge/e"],
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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call to etcd fail because this machine is busy."""
    monkeypatch.setattr("tailrace.store.client._DEADLINE_S", WAIT_S)


@pytest.fixture
async def secured_etcd(authority: Authority, tmp_path: Path) -> AsyncIterator[SecuredEtcd]:
    folder = authority.issue(Identity(Role.ETCD, "etcd"), hosts=["127.0.0.1"]).folder
    async with local_etcd(tmp_path / "etcd", tls=folder) as etcd:
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
    async with asyncio.timeout(WAIT_S):
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


@pytest.mark.parametrize("reader", [Role.EDGE, Role.SCHEDULER])
async def test_clusters_that_belong_to_ones_own_are_read(secured_etcd: SecuredEtcd, reader: Role) -> None:
    client = EtcdClient(
        parse_endpoints([secured_etcd.etcd.endpoint]), transport(secured_etcd.authority, Role.ETCD_ROOT)
    )
    below = f"{CLUSTER}.chat"
    await apply_rights(client, etcd_rights(below), below)
    await client.close()
    async with AsyncExitStack() as stack:
        stores = {}
        for role in (Role.FRONTEND, reader):
            own = transport(secured_etcd.authority, role)
            stores[role] = Store(EtcdClient(parse_endpoints([secured_etcd.etcd.endpoint]), own), below)
            stack.push_async_callback(stores[role].close)
        await stores[Role.FRONTEND].put("services/frontend/f", b"here")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await stores[reader].put("services/frontend/f", b"not mine")
        own_store = await secured_etcd.store(transport(secured_etcd.authority, reader))
        stack.push_async_callback(own_store.close)
        async with asyncio.timeout(WAIT_S), aclosing(own_store.watch_below()) as watch:
            assert await anext(watch) == {"chat/services/frontend/f": b"here"}
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await Store(own_store._client, f"{CLUSTER}2").get("policy")


async def test_watch_survives_certificate_rotation(secured_etcd: SecuredEtcd) -> None:
    own = transport(secured_etcd.authority, Role.SCHEDULER)
    store = await secured_etcd.store(own)
    async with asyncio.timeout(WAIT_S):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        before = own.version
        secured_etcd.authority.rotate()
        await store.put("pools/w", b"prefill")
        assert own.version > before
        assert await anext(watch) == {"pools/w": b"prefill"}
        await watch.aclose()
    await store.close()


async def ends_of_methods(port: int, credentials: Credentials) -> set[str]:
    """Call methods on which etcd checks a user, and some on which it checks none; return the statuses."""
    ends = set()
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials.for_channels()) as channel:
        for method in ("KV/Range", "Lease/LeaseLeases", "Maintenance/Alarm", "Cluster/MemberList"):
            path = f"/etcdserverpb.{method}"
            call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
            try:
                await call(b"", timeout=WAIT_S)
                ends.add("OK")
            except grpc.aio.AioRpcError as error:
                ends.add(error.code().name)
    return ends


def ports_of(etcd: LocalEtcd) -> list[int]:
    """Return the ports for clients and for peers."""
    assert etcd.pid is not None
    connections = psutil.Process(etcd.pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


async def test_only_members_get_as_far_as_etcds_methods(secured_etcd: SecuredEtcd) -> None:
    """On some methods etcd checks no user; the peers' port is for etcd alone."""
    authority, port = secured_etcd.authority, secured_etcd.etcd.port
    (peer_port,) = set(ports_of(secured_etcd.etcd)) - {port}
    trusted = (authority.folder / "etcd-ca.crt").read_bytes()
    for role in Role:
        own = replace(read_credentials(authority.issue(Identity(role, "x")).folder), authorities=trusted)
        if role is not Role.ETCD:
            assert await ends_of_methods(peer_port, own.etcd or own) == {"UNAVAILABLE"}, role
        if role not in (Role.ETCD, Role.ETCD_ROOT):
            assert await ends_of_methods(port, own) == {"UNAVAILABLE"}, role
        if role in MEMBERS:
            assert own.etcd is not None and "OK" in await ends_of_methods(port, own.etcd)


async def test_health_and_metrics_require_a_certificate_of_etcds_authority(secured_etcd: SecuredEtcd) -> None:
    telemetry = secured_etcd.authority.issue(Identity(Role.TELEMETRY, "x")).folder
    for port in ports_of(secured_etcd.etcd):
        for path in ("health", "metrics"):
            for scheme, context in (
                ("http", None),
                ("https", ssl._create_unverified_context()),
                ("https", _unverified(telemetry)),
            ):
                with pytest.raises(Unhealthy):
                    await asyncio.to_thread(
                        check_http, f"{scheme}://127.0.0.1:{port}/{path}", WAIT_S, context
                    )


def _unverified(folder: Path) -> ssl.SSLContext:
    context = ssl._create_unverified_context()
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


async def test_installation_without_an_authority_for_etcd_moves_over(tmp_path: Path) -> None:
    """By the steps that replace an authority; etcd restarts after the first and the last."""
    folder = tmp_path / "certs"
    Authority.create(folder)
    for name in ("etcd-ca.key", "etcd-ca.crt"):
        (folder / name).unlink()
    authority = Authority.load(folder)
    server = authority.issue(Identity(Role.ETCD, "etcd"), hosts=["127.0.0.1"]).folder
    worker = authority.issue(Identity(Role.WORKER, "w")).folder
    telemetry = read_credentials(authority.issue(Identity(Role.TELEMETRY, "t")).folder)
    assert not (worker / "etcd").exists() and not authority.separates_etcd
    etcd = LocalEtcd(tmp_path / "etcd", free_port(), tls=server)

    used = [read_credentials(worker)]

    async def check() -> set[str]:
        """Return what a worker with the folder as it is, and one with the folder before the step, get."""
        used.append(read_credentials(worker))
        return {end for each in used[-2:] for end in await ends_of_methods(etcd.port, each.etcd or each)}

    try:
        await etcd.start()
        assert "OK" in await check()
        Authority.load(folder).supersede()
        assert "UNAVAILABLE" not in await check()
        await asyncio.to_thread(etcd.stop)
        await etcd.start()
        assert "UNAVAILABLE" not in await check()
        Authority.load(folder).rotate()
        # Etcd reads its own certificate for each connection.
        assert "UNAVAILABLE" not in await check()
        Authority.load(folder).retire()
        assert "UNAVAILABLE" not in await check()
        await asyncio.to_thread(etcd.stop)
        await etcd.start()
        assert "UNAVAILABLE" not in await check()
        trusting = replace(telemetry, authorities=read_credentials(server).authorities)
        assert await ends_of_methods(etcd.port, trusting) == {"UNAVAILABLE"}
    finally:
        await asyncio.to_thread(etcd.stop)


async def test_etcd_refuses_clients_without_a_valid_certificate(
    secured_etcd: SecuredEtcd, foreign: Authority
) -> None:
    for own in (PLAIN, transport(foreign, Role.SCHEDULER)):
        client = EtcdClient(parse_endpoints([secured_etcd.etcd.endpoint]), own)
        with pytest.raises(StoreUnavailable):
            await Store(client, CLUSTER).get("policy")
        await client.close()
