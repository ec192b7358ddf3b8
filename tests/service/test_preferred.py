"""The elected service first, then the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.records import ServiceRecord
from tailrace.service.channels import first_address, preferred


def record(name: str, kind: str = "monitor") -> ServiceRecord:
    """Return a record with its name as host."""
    return ServiceRecord(kind=kind, service_id=name, incarnation="1", address=f"{name}:1")


@dataclass
class Members:
    """Members as in etcd."""

    services: Mapping[tuple[str, str], ServiceRecord] = field(default_factory=dict)
    leaders: Mapping[str, ServiceRecord] = field(default_factory=dict)


def ids(members: Members) -> list[str]:
    """Return the IDs in order of preference."""
    return [each.service_id for each in preferred(members, "monitor")]


def test_the_leader_comes_first_and_each_service_once() -> None:
    services = {
        (r.kind, r.service_id): r for r in (record("b"), record("a"), record("c"), record("a", "worker"))
    }
    assert ids(Members(services)) == ["a", "b", "c"]
    assert ids(Members(services, {"monitor": record("b")})) == ["b", "a", "c"]
    # Its registration was lost, but not its leadership yet.
    assert ids(Members({}, {"monitor": record("z")})) == ["z"]
    assert first_address(Members(services, {"monitor": record("c")}), "monitor") == "c:1"


def test_no_services() -> None:
    assert ids(Members()) == []
    assert first_address(Members({}, {"scheduler": record("s", "scheduler")}), "monitor") is None
