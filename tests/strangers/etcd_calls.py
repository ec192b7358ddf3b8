"""All methods of etcd's services as each role and as nobody, against an etcd with the roles applied.

Each call is one that etcd carries out for its root user, which is checked last of all: so a refusal is one of
rights, and not of a wrong request.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from tailrace.security.roles import MEMBERS, Role, etcd_user
from tailrace.store.etcd_api import prefix_end
from tailrace.store.etcd_roles import REVISION_KEY, etcd_rights
from tailrace.v1 import etcd_pb2

_CALL_S: Final = 5.0
# A member's lease, which another one may not end, is that of a key; a number for each writer of one.
_FIRST_LEASE: Final = 7_001
# Attached to a key of nobody's.
_OUTSIDE_LEASE: Final = 7_000
_OUTSIDE: Final = "/another/key"
_NOBODY: Final = b"nobody-such"

# In the order of the calls: a key that is written again has no lease any more.
_SERVICES: Final[Mapping[str, tuple[str, ...]]] = {
    "etcdserverpb.Lease": ("LeaseGrant", "LeaseKeepAlive", "LeaseTimeToLive", "LeaseLeases", "LeaseRevoke"),
    "etcdserverpb.KV": ("Range", "Put", "DeleteRange", "Txn", "Compact"),
    "etcdserverpb.Watch": ("Watch",),
    "etcdserverpb.Cluster": ("MemberAdd", "MemberRemove", "MemberUpdate", "MemberList", "MemberPromote"),
    "etcdserverpb.Maintenance": (
        "Alarm",
        "Status",
        "Defragment",
        "Hash",
        "HashKV",
        "Snapshot",
        "MoveLeader",
        "Downgrade",
    ),
    "etcdserverpb.Auth": (
        "AuthEnable",
        "AuthStatus",
        "Authenticate",
        "UserAdd",
        "UserGet",
        "UserList",
        "UserDelete",
        "UserChangePassword",
        "UserGrantRole",
        "UserRevokeRole",
        "RoleAdd",
        "RoleGet",
        "RoleList",
        "RoleDelete",
        "RoleGrantPermission",
        "RoleRevokePermission",
        # Last of all, since root does it.
        "AuthDisable",
    ),
    "v3lockpb.Lock": ("Lock", "Unlock"),
    "v3electionpb.Election": ("Campaign", "Proclaim", "Leader", "Observe", "Resign"),
}
METHODS: Final = tuple(f"/{service}/{name}" for service, names in _SERVICES.items() for name in names)
"""All methods of etcd's public services."""

# Of the lines 3.5, 3.6 and 3.7, the first release that checks the user on these methods (docs/security.md).
_CHECKS_SINCE: Final = ((3, 5, 33), (3, 6, 14), (3, 7, 1))

_REFUSALS: Final = frozenset(
    {"UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "ENDED"}
)
# etcd's other services tell them with the status UNKNOWN. Of the user: there is none of this name.
_REASONS: Final = (
    "permission denied",
    "authentication failed",
    "invalid auth token",
    "user name is empty",
    "user name not found",
    "auth: user not found",
)


class Outcome(enum.StrEnum):
    """What came of a call."""

    REFUSED = "refused"
    ALLOWED = "allowed by design"
    # Answered to a client with a certificate of etcd's authority, since this etcd asks for no more.
    UNCHECKED = "not checked by this etcd"
    IMPROPER = "improperly answered"
    # Of the caller's own rights.
    MISSING = "refused, though allowed by design"


@dataclass(frozen=True, slots=True)
class EtcdCall:
    """One request, and which roles may make it besides root."""

    method: str
    request: bytes
    # What distinguishes it from other requests of the method.
    what: str = ""
    by_design: frozenset[Role] = frozenset()
    # Whether old versions of etcd check no user.
    unchecked: bool = False

    def __str__(self) -> str:
        return f"{self.method.removeprefix('/')} {self.what}".rstrip()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `credentials` None: without TLS."""

    name: str
    credentials: grpc.ChannelCredentials | None
    role: Role | None = None
    # Whether etcd's authority has signed its certificate.
    is_trusted: bool = False


def message(fields: Mapping[int, int | bytes | str | list[bytes]]) -> bytes:
    """Encode a protobuf message by its fields' numbers: integers, bytes, and lists of messages."""
    encoded = bytearray()
    for number, value in fields.items():
        if isinstance(value, int):
            encoded += _varint(number << 3) + _varint(value)
            continue
        for each in value if isinstance(value, list) else [value]:
            data = each.encode() if isinstance(each, str) else each
            encoded += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(encoded)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def writers(cluster: str) -> dict[str, frozenset[Role]]:
    """Return one key for each right to write in the cluster, with the roles that have it."""
    found: dict[str, frozenset[Role]] = {}
    for rights in etcd_rights(cluster):
        for name in rights.writes:
            key = f"{name}x" if name.endswith("/") else name
            found[key] = found.get(key, frozenset()) | {rights.role}
    return found


def lease_of(cluster: str) -> dict[str, int]:
    """Return the leases that `prepare` attaches to keys, by key."""
    return {key: _FIRST_LEASE + number for number, key in enumerate(writers(cluster))} | {
        _OUTSIDE: _OUTSIDE_LEASE
    }


def etcd_calls(cluster: str) -> list[EtcdCall]:
    """Return all calls, at least one of each method. Those that end what others need come last."""
    calls = [*_key_calls(cluster), *_lease_calls(cluster), *_other_calls()]
    order = {method: number for number, method in enumerate(METHODS)}
    return sorted(calls, key=lambda call: order[call.method])


def _key_calls(cluster: str) -> Iterator[EtcdCall]:
    prefix = f"{REVISION_KEY}/{cluster}/".encode()
    spans = {
        "the cluster": (prefix, prefix_end(prefix), MEMBERS),
        "another cluster": (f"{REVISION_KEY}/{cluster}-2/".encode(), b"", frozenset[Role]()),
        "all clusters": (
            f"{REVISION_KEY}/".encode(),
            prefix_end(f"{REVISION_KEY}/".encode()),
            frozenset[Role](),
        ),
        "everything": (b"\0", b"\0", frozenset[Role]()),
    }
    for what, (key, end, roles) in spans.items():
        yield EtcdCall("/etcdserverpb.KV/Range", message({1: key, 2: end}), what, roles)
        watch = message({1: message({1: key, 2: end})})
        yield EtcdCall("/etcdserverpb.Watch/Watch", watch, what, roles)
    keys = writers(cluster) | {
        _OUTSIDE: frozenset[Role](),
        f"{REVISION_KEY}/{cluster}-2/policy": frozenset[Role](),
        REVISION_KEY: frozenset[Role](),
    }
    for name, roles in keys.items():
        put = message({1: name, 2: b"by a stranger"})
        delete = message({1: name})
        nested = message({2: [message({2: put})]})
        yield EtcdCall("/etcdserverpb.KV/Put", put, name, roles)
        yield EtcdCall("/etcdserverpb.KV/DeleteRange", delete, name, roles)
        yield EtcdCall("/etcdserverpb.KV/Txn", nested, f"put {name}", roles)
        yield EtcdCall("/etcdserverpb.KV/Txn", message({2: [message({3: delete})]}), f"delete {name}", roles)
        yield EtcdCall(
            "/etcdserverpb.KV/Txn",
            message({2: [message({4: nested})]}),
            f"nested put {name}",
            roles,
            unchecked=True,
        )
    yield EtcdCall("/etcdserverpb.KV/Compact", message({1: 2}), unchecked=True)
    lock = message({1: _OUTSIDE, 2: _OUTSIDE_LEASE})
    leader = message({1: _OUTSIDE, 2: _OUTSIDE, 3: 1, 4: _OUTSIDE_LEASE})
    yield EtcdCall("/v3lockpb.Lock/Lock", lock)
    yield EtcdCall("/v3lockpb.Lock/Unlock", message({1: _OUTSIDE}))
    yield EtcdCall("/v3electionpb.Election/Campaign", message({1: _OUTSIDE, 2: _OUTSIDE_LEASE, 3: b"me"}))
    yield EtcdCall("/v3electionpb.Election/Proclaim", message({1: leader, 2: b"me"}))
    yield EtcdCall("/v3electionpb.Election/Leader", message({1: _OUTSIDE}))
    yield EtcdCall("/v3electionpb.Election/Observe", message({1: _OUTSIDE}))
    yield EtcdCall("/v3electionpb.Election/Resign", message({1: leader}))


def _lease_calls(cluster: str) -> Iterator[EtcdCall]:
    """Leases have no owner in etcd, but their keys have."""
    roles_of = writers(cluster) | {_OUTSIDE: frozenset[Role]()}
    for key, lease in lease_of(cluster).items():
        yield EtcdCall("/etcdserverpb.Lease/LeaseRevoke", message({1: lease}), f"of {key}", roles_of[key])
    yield EtcdCall("/etcdserverpb.Lease/LeaseGrant", message({1: 10}), "", MEMBERS, True)
    yield EtcdCall("/etcdserverpb.Lease/LeaseKeepAlive", message({1: _FIRST_LEASE}), "", MEMBERS, True)
    keys_of = message({1: _OUTSIDE_LEASE, 2: 1})
    yield EtcdCall("/etcdserverpb.Lease/LeaseTimeToLive", keys_of, f"keys of {_OUTSIDE}", unchecked=True)
    yield EtcdCall("/etcdserverpb.Lease/LeaseLeases", b"", unchecked=True)


def _other_calls() -> Iterator[EtcdCall]:
    member, user, role = message({1: 1}), message({1: _NOBODY}), "root"
    mine = etcd_user(Role.WORKER)
    permission = message({1: 2, 2: b"\0", 3: b"\0"})
    requests: Mapping[str, Mapping[str, tuple[bytes, bool]]] = {
        "Cluster": {
            "MemberAdd": (message({1: [b"http://127.0.0.1:9"], 2: 1}), False),
            "MemberRemove": (member, False),
            "MemberUpdate": (message({1: 1, 2: [b"http://127.0.0.1:9"]}), False),
            "MemberList": (b"", True),
            "MemberPromote": (member, False),
        },
        "Maintenance": {
            # Disarm NOSPACE, which is not raised: the same right as to raise it.
            "Alarm": (message({1: 2, 3: 1}), True),
            "Status": (b"", True),
            "Defragment": (b"", False),
            "Hash": (b"", False),
            "HashKV": (b"", False),
            "Snapshot": (b"", False),
            "MoveLeader": (message({1: 1}), True),
            # Only whether it could.
            "Downgrade": (message({2: "3.4.0"}), True),
        },
        "Auth": {
            "AuthEnable": (b"", False),
            "AuthStatus": (b"", False),
            "Authenticate": (message({1: "root", 2: "guess"}), False),
            "UserAdd": (message({1: _NOBODY, 3: message({1: 1})}), False),
            "UserGet": (message({1: "root"}), False),
            "UserList": (b"", False),
            "UserDelete": (user, False),
            "UserChangePassword": (message({1: mine, 2: "guess"}), False),
            "UserGrantRole": (message({1: mine, 2: role}), False),
            "UserRevokeRole": (message({1: mine, 2: role}), False),
            "RoleAdd": (user, False),
            "RoleGet": (message({1: role}), False),
            "RoleList": (b"", False),
            "RoleGrantPermission": (message({1: _NOBODY, 2: permission}), False),
            "RoleRevokePermission": (message({1: _NOBODY, 2: b"\0", 3: b"\0"}), False),
            "RoleDelete": (user, False),
            "AuthDisable": (b"", False),
        },
    }
    for service, methods in requests.items():
        for name, (request, unchecked) in methods.items():
            yield EtcdCall(f"/etcdserverpb.{service}/{name}", request, unchecked=unchecked)


def prepare(address: str, root: grpc.ChannelCredentials, cluster: str) -> None:
    """Attach a lease to each key, as if its owner had registered it. Raise grpc.RpcError."""
    with grpc.secure_channel(address, root) as channel:
        for key, lease in lease_of(cluster).items():
            for method, request in (
                ("Lease/LeaseGrant", message({1: 600, 2: lease})),
                ("KV/Put", message({1: key, 2: b"its owner's", 3: lease})),
            ):
                end = _end(channel, f"/etcdserverpb.{method}", request)
                if end not in ("OK", "FAILED_PRECONDITION: etcdserver: lease already exists"):
                    raise RuntimeError(f"{method} as root: {end}")


def version_of(address: str, root: grpc.ChannelCredentials) -> tuple[int, ...]:
    """Return the version of the etcd. Raise grpc.RpcError."""
    with grpc.secure_channel(address, root) as channel:
        call = channel.unary_unary(
            "/etcdserverpb.Maintenance/Status", request_serializer=bytes, response_deserializer=bytes
        )
        reply: bytes = call(b"", timeout=_CALL_S)
    # A header in field 1, the version in field 2.
    length = reply[1]
    start = 2 + length
    return tuple(int(part) for part in reply[start + 2 : start + 2 + reply[start + 1]].split(b"."))


def checks_all(version: tuple[int, ...]) -> bool:
    """Return whether an etcd of this version checks the user on every method."""
    line = [since for since in _CHECKS_SINCE if since[:2] == version[:2]]
    return version >= line[0] if line else version > _CHECKS_SINCE[-1]


def call_etcd(address: str, caller: Caller, calls: Iterable[EtcdCall]) -> dict[EtcdCall, str]:
    """Make all calls; return how each ended: OK, or a status and its reason."""
    channel = (
        grpc.insecure_channel(address)
        if caller.credentials is None
        else grpc.secure_channel(address, caller.credentials)
    )
    with channel:
        return {call: _end(channel, call.method, call.request) for call in calls}


def _end(channel: grpc.Channel, method: str, request: bytes) -> str:
    call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
    stream = call(iter([request]), timeout=_CALL_S)
    try:
        reply = next(iter(stream), None)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return f"{error.code().name}: {error.details()}"
    finally:
        stream.cancel()
    if reply is None:
        return "ENDED: without a reply"
    if method.endswith("/Watch"):
        watch = etcd_pb2.WatchResponse.FromString(reply)
        if watch.canceled:
            return f"PERMISSION_DENIED: {watch.cancel_reason}"
    return "OK"


def is_refusal(end: str) -> bool:
    """Return whether etcd, or the handshake, refused the caller and not the request."""
    code, _, details = end.partition(": ")
    return code in _REFUSALS or any(reason in details for reason in _REASONS)


def outcome(call: EtcdCall, caller: Caller, end: str, *, all_checked: bool) -> Outcome:
    """Judge how a call ended."""
    refused = is_refusal(end) or (not caller.is_trusted and end.startswith("DEADLINE_EXCEEDED"))
    if caller.is_trusted and caller.role in call.by_design:
        return Outcome.MISSING if refused else Outcome.ALLOWED
    if refused:
        return Outcome.REFUSED
    if call.unchecked and caller.is_trusted and not all_checked:
        return Outcome.UNCHECKED
    return Outcome.IMPROPER
