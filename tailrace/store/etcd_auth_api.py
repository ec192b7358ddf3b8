"""etcd's API for users and roles (service etcdserverpb.Auth)."""

from __future__ import annotations

from typing import Final

from tailrace.store.etcd_api import method
from tailrace.v1 import etcd_pb2

AUTH_ENABLE: Final = method(
    "/etcdserverpb.Auth/AuthEnable", etcd_pb2.AuthEnableRequest, etcd_pb2.AuthEnableResponse
)
USER_ADD: Final = method(
    "/etcdserverpb.Auth/UserAdd", etcd_pb2.AuthUserAddRequest, etcd_pb2.AuthUserAddResponse
)
USER_GET: Final = method(
    "/etcdserverpb.Auth/UserGet", etcd_pb2.AuthUserGetRequest, etcd_pb2.AuthUserGetResponse
)
USER_GRANT_ROLE: Final = method(
    "/etcdserverpb.Auth/UserGrantRole", etcd_pb2.AuthUserGrantRoleRequest, etcd_pb2.AuthUserGrantRoleResponse
)
ROLE_ADD: Final = method(
    "/etcdserverpb.Auth/RoleAdd", etcd_pb2.AuthRoleAddRequest, etcd_pb2.AuthRoleAddResponse
)
ROLE_GET: Final = method(
    "/etcdserverpb.Auth/RoleGet", etcd_pb2.AuthRoleGetRequest, etcd_pb2.AuthRoleGetResponse
)
ROLE_GRANT: Final = method(
    "/etcdserverpb.Auth/RoleGrantPermission",
    etcd_pb2.AuthRoleGrantPermissionRequest,
    etcd_pb2.AuthRoleGrantPermissionResponse,
)
ROLE_REVOKE: Final = method(
    "/etcdserverpb.Auth/RoleRevokePermission",
    etcd_pb2.AuthRoleRevokePermissionRequest,
    etcd_pb2.AuthRoleRevokePermissionResponse,
)
