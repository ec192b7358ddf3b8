"""Faults of one member, and how they are undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tests.harness.etcd_members import FaultyCluster, FaultyMember

Action = Callable[[FaultyCluster, FaultyMember], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `whole_cluster`: while it lasts there is no leader, and nothing can be written."""

    description: str
    inject: Action
    undo: Action
    whole_cluster: bool = False


def _on_member(act: Callable[[FaultyMember], None]) -> Action:
    return lambda cluster, member: act(member)


FAULTS: Final[Mapping[str, Fault]] = {
    "stopped": Fault("SIGSTOP", _on_member(FaultyMember.suspend), _on_member(FaultyMember.resume)),
    "isolated": Fault(
        "partitioned from the other members, but not from clients",
        _on_member(FaultyMember.isolate),
        _on_member(FaultyMember.rejoin),
    ),
    "cut": Fault(
        "partitioned from everything", _on_member(FaultyMember.cut), _on_member(FaultyMember.restore)
    ),
    "full-disk": Fault(
        "no space left on its disk: etcd exits",
        _on_member(FaultyMember.fill_disk),
        _on_member(FaultyMember.free_disk),
    ),
    "hung-disk": Fault(
        "its disk blocks every write",
        _on_member(FaultyMember.hang_disk),
        _on_member(FaultyMember.resume_disk),
    ),
    "all-down": Fault(
        "kill -9 of all three",
        lambda cluster, member: cluster.kill(),
        lambda cluster, member: cluster.launch(),
        whole_cluster=True,
    ),
}
DEFAULT: Final = ("stopped", "isolated", "cut", "full-disk")
"""A hanging disk needs root and loop devices, and blocks every `sync` on the machine."""
