"""etcd's public v3 gRPC API: the methods and requests that Tailrace uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from tailrace.v1 import etcd_pb2

Request = TypeVar("Request")
Reply = TypeVar("Reply")
_RequestMessage = TypeVar("_RequestMessage", bound=Message)
_ReplyMessage = TypeVar("_ReplyMessage", bound=Message)

# A member without a leader refuses at once, and ends streams that it can no longer serve, instead of keeping
# silent.
REQUIRE_LEADER: Final = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """A method of etcd's API, and how its messages are encoded and decoded."""

    path: str
    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Reply]


def method(
    path: str, request: type[_RequestMessage], reply: type[_ReplyMessage]
) -> Method[_RequestMessage, _ReplyMessage]:
    """Return the method at this path with these message types."""
    return Method(path, request.SerializeToString, reply.FromString)


RANGE: Final = method("/etcdserverpb.KV/Range", etcd_pb2.RangeRequest, etcd_pb2.RangeResponse)
TXN: Final = method("/etcdserverpb.KV/Txn", etcd_pb2.TxnRequest, etcd_pb2.TxnResponse)
LEASE_GRANT: Final = method(
    "/etcdserverpb.Lease/LeaseGrant", etcd_pb2.LeaseGrantRequest, etcd_pb2.LeaseGrantResponse
)
LEASE_REVOKE: Final = method(
    "/etcdserverpb.Lease/LeaseRevoke", etcd_pb2.LeaseRevokeRequest, etcd_pb2.LeaseRevokeResponse
)
# Streams both ways.
LEASE_KEEP_ALIVE: Final = method(
    "/etcdserverpb.Lease/LeaseKeepAlive", etcd_pb2.LeaseKeepAliveRequest, etcd_pb2.LeaseKeepAliveResponse
)
WATCH: Final = method("/etcdserverpb.Watch/Watch", etcd_pb2.WatchRequest, etcd_pb2.WatchResponse)


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with the prefix, which must not be empty."""
    stripped = prefix.rstrip(b"\xff")
    # Of a prefix of 0xff alone nothing is after it: etcd writes that as one zero byte.
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def put_op(key: bytes, value: bytes, lease: int = 0) -> etcd_pb2.RequestOp:
    """Return the operation that sets a value; with lease 0 it stays until it is deleted."""
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=lease))


def delete_op(key: bytes) -> etcd_pb2.RequestOp:
    """Return the operation that deletes one key."""
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=key))


def get_op(key: bytes) -> etcd_pb2.RequestOp:
    """Return the operation that reads one key."""
    return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key))


def unchanged(key: bytes, present: etcd_pb2.KeyValue | None) -> etcd_pb2.Compare:
    """Return the condition that nobody has written the key since it was read as `present` (None: no key).

    It compares revisions, not values: a value may come back, a revision never does.
    """
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.EQUAL,
        target=etcd_pb2.Compare.MOD,
        key=key,
        mod_revision=0 if present is None else present.mod_revision,
    )


def watch_prefix_request(prefix: bytes) -> etcd_pb2.WatchRequest:
    """Return the request to watch all keys that begin with the prefix, from now on."""
    create = etcd_pb2.WatchCreateRequest(
        key=prefix, range_end=prefix_end(prefix), progress_notify=True, fragment=True
    )
    return etcd_pb2.WatchRequest(create_request=create)


def progress_request() -> etcd_pb2.WatchRequest:
    """Return the request for the member's current revision; the reply comes on the watch's own stream."""
    return etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest())


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
