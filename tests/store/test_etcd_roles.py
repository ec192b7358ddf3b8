"""etcd's users and roles are set up whole where answers are late or lost."""

from __future__ import annotations

from pathlib import Path

from tailrace.address import parse_endpoints
from tailrace.security.roles import Role
from tailrace.store.client import EtcdClient
from tailrace.store.etcd_api import ROLE_ADD, ROLE_GRANT, ROLE_REVOKE, USER_ADD, USER_GRANT_ROLE
from tailrace.store.etcd_roles import apply_rights, etcd_rights, role_name
from tailrace.v1 import etcd_pb2
from tests.harness.local_etcd import local_etcd
from tests.store.etcd_proxy import etcd_proxy


async def test_changes_with_lost_answers_are_made_once(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd, etcd_proxy(etcd.endpoint) as proxy:
        client = EtcdClient(parse_endpoints([proxy.endpoint]))
        try:
            role, surplus = role_name(Role.WORKER, "c"), etcd_pb2.Permission(key=b"surplus")
            await client.call(ROLE_ADD, etcd_pb2.AuthRoleAddRequest(name=role), "add")
            await client.call(
                ROLE_GRANT, etcd_pb2.AuthRoleGrantPermissionRequest(name=role, perm=surplus), "grant"
            )
            methods = (USER_ADD, ROLE_ADD, ROLE_GRANT, USER_GRANT_ROLE, ROLE_REVOKE)
            proxy.lost += [each.path for each in methods]
            changes = await apply_rights(client, etcd_rights("c"), "c")
            assert not proxy.lost
            assert len(set(changes)) == len(changes)
            assert f"role {role}: no longer surplus" in changes
        finally:
            await client.close()
