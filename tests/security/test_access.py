"""The table of methods and roles: it contains exactly the served methods."""

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
    """Return the descriptors of all files whose services are served."""
    names = [m.name for m in pkgutil.iter_modules(tailrace.v1.__path__) if m.name.endswith("_pb2")]
    ours = [importlib.import_module(f"tailrace.v1.{name}") for name in names]
    return [m.DESCRIPTOR for m in (*ours, health_pb2, reflection_pb2, trace_service_pb2)]


def served() -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for file in files()
        for service in file.services_by_name.values()
        for method in service.methods
        # Health.List exists only in later versions of the protocol, and gRPC's own servicer lacks it.
        if method.name != "List"
    }


def test_table_contains_exactly_the_served_methods() -> None:
    assert served() == set(METHODS)


def test_methods_outside_the_table_are_denied() -> None:
    assert not allowed("/tailrace.v1.Worker/Shutdown")
    assert denial(Role.ADMIN, "me", "/x/Y") == "/x/Y is not available to any role"


def test_viewers_may_call_only_reading_methods() -> None:
    for method, roles in METHODS.items():
        service, name = method.rsplit("/", 1)
        if service == "/tailrace.v1.Admin":
            assert (Role.VIEWER in roles) == name.startswith(("Get", "List", "Watch")), method
            assert Role.ADMIN in roles, method


def test_operators_may_call_only_the_admin_api() -> None:
    for method, roles in METHODS.items():
        if method.startswith("/tailrace.v1.") and not method.startswith("/tailrace.v1.Admin/"):
            assert not roles & OPERATORS, method
            assert roles < MEMBERS, method
