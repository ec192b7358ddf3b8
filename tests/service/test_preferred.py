"""The elected service first, then the others."""

from __future__ import annotations

from tailrace.records import ServiceRecord
from tailrace.service.channels import first_address, preferred
from tests.static_members import StaticMembers


def record(name: str, kind: str = "monitor") -> ServiceRecord:
    """Return a record with its name as host."""
    return ServiceRecord(kind=kind, service_id=name, incarnation="1", address=f"{name}:1")


def ids(members: StaticMembers) -> list[str]:
    """Return the IDs in order of preference."""
    return [each.service_id for each in preferred(members, "monitor")]


def test_the_leader_comes_first_and_each_service_once() -> None:
    services = {
        (r.kind, r.service_id): r for r in (record("b"), record("a"), record("c"), record("a", "worker"))
    }
    assert ids(StaticMembers(services=services)) == ["a", "b", "c"]
    assert ids(StaticMembers(services=services, leaders={"monitor": record("b")})) == ["b", "a", "c"]
    # Its registration was lost, but not its leadership yet.
    assert ids(StaticMembers(leaders={"monitor": record("z")})) == ["z"]
    led = StaticMembers(services=services, leaders={"monitor": record("c")})
    assert first_address(led, "monitor") == "c:1"


def test_no_services() -> None:
    assert ids(StaticMembers()) == []
    other = StaticMembers(leaders={"scheduler": record("s", "scheduler")})
    assert first_address(other, "monitor") is None
