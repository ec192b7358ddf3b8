"""The table of methods: each that we serve is in it, and no other."""

from __future__ import annotations

import importlib
import pkgutil

from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import tailrace.v1
from tailrace.security.access import METHODS, allowed, denial
from tailrace.security.roles import MEMBERS, OPERATORS, Role


def files() -> list[FileDescriptor]:
    """Of everything that any of our servers serves."""
    names = [m.name for m in pkgutil.iter_modules(tailrace.v1.__path__) if m.name.endswith("_pb2")]
    ours = [importlib.import_module(f"tailrace.v1.{name}") for name in names]
    return [m.DESCRIPTOR for m in (*ours, health_pb2, reflection_pb2, trace_service_pb2)]


def served() -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for file in files()
        for service in file.services_by_name.values()
        for method in service.methods
        # Health.List came with a later version of the protocol, and gRPC's own servicer has none.
        if method.name != "List"
    }


def test_every_method_is_in_the_table_and_no_other() -> None:
    assert served() == set(METHODS)


def test_what_is_not_in_the_table_nobody_may_call() -> None:
    assert not allowed("/tailrace.v1.Worker/Shutdown")
    assert denial(Role.ADMIN, "me", "/x/Y") == "/x/Y is not available to any role"


def test_who_looks_does_not_change() -> None:
    for method, roles in METHODS.items():
        service, name = method.rsplit("/", 1)
        if service == "/tailrace.v1.Admin":
            assert (Role.VIEWER in roles) == name.startswith(("Get", "List", "Watch")), method
            assert Role.ADMIN in roles, method


def test_operators_reach_no_member_but_the_scheduler() -> None:
    for method, roles in METHODS.items():
        if method.startswith("/tailrace.v1.") and not method.startswith("/tailrace.v1.Admin/"):
            assert not roles & OPERATORS, method
            assert roles < MEMBERS, method
