"""etcd's API for users and roles (service etcdserverpb.Auth)."""

from __future__ import annotations

from typing import Final

from tailrace.store.etcd_api import Method
from tailrace.v1 import etcd_pb2

AUTH_ENABLE: Final[Method[etcd_pb2.AuthEnableRequest, etcd_pb2.AuthEnableResponse]] = Method(
    "/etcdserverpb.Auth/AuthEnable",
    etcd_pb2.AuthEnableRequest.SerializeToString,
    etcd_pb2.AuthEnableResponse.FromString,
)
USER_ADD: Final[Method[etcd_pb2.AuthUserAddRequest, etcd_pb2.AuthUserAddResponse]] = Method(
    "/etcdserverpb.Auth/UserAdd",
    etcd_pb2.AuthUserAddRequest.SerializeToString,
    etcd_pb2.AuthUserAddResponse.FromString,
)
USER_GET: Final[Method[etcd_pb2.AuthUserGetRequest, etcd_pb2.AuthUserGetResponse]] = Method(
    "/etcdserverpb.Auth/UserGet",
    etcd_pb2.AuthUserGetRequest.SerializeToString,
    etcd_pb2.AuthUserGetResponse.FromString,
)
USER_GRANT_ROLE: Final[Method[etcd_pb2.AuthUserGrantRoleRequest, etcd_pb2.AuthUserGrantRoleResponse]] = (
    Method(
        "/etcdserverpb.Auth/UserGrantRole",
        etcd_pb2.AuthUserGrantRoleRequest.SerializeToString,
        etcd_pb2.AuthUserGrantRoleResponse.FromString,
    )
)
ROLE_ADD: Final[Method[etcd_pb2.AuthRoleAddRequest, etcd_pb2.AuthRoleAddResponse]] = Method(
    "/etcdserverpb.Auth/RoleAdd",
    etcd_pb2.AuthRoleAddRequest.SerializeToString,
    etcd_pb2.AuthRoleAddResponse.FromString,
)
ROLE_GET: Final[Method[etcd_pb2.AuthRoleGetRequest, etcd_pb2.AuthRoleGetResponse]] = Method(
    "/etcdserverpb.Auth/RoleGet",
    etcd_pb2.AuthRoleGetRequest.SerializeToString,
    etcd_pb2.AuthRoleGetResponse.FromString,
)
ROLE_GRANT: Final[
    Method[etcd_pb2.AuthRoleGrantPermissionRequest, etcd_pb2.AuthRoleGrantPermissionResponse]
] = Method(
    "/etcdserverpb.Auth/RoleGrantPermission",
    etcd_pb2.AuthRoleGrantPermissionRequest.SerializeToString,
    etcd_pb2.AuthRoleGrantPermissionResponse.FromString,
)
ROLE_REVOKE: Final[
    Method[etcd_pb2.AuthRoleRevokePermissionRequest, etcd_pb2.AuthRoleRevokePermissionResponse]
] = Method(
    "/etcdserverpb.Auth/RoleRevokePermission",
    etcd_pb2.AuthRoleRevokePermissionRequest.SerializeToString,
    etcd_pb2.AuthRoleRevokePermissionResponse.FromString,
)
