"""The faults: what happens to one member, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.etcd_faults.cluster import FaultyCluster, FaultyMember

Act = Callable[[FaultyCluster, FaultyMember], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `of_all`: nobody can lead while it lasts, and nothing be written."""

    tells: str
    inject: Act
    undo: Act
    of_all: bool = False


def _one(act: Callable[[FaultyMember], None]) -> Act:
    return lambda cluster, member: act(member)


FAULTS: Final[Mapping[str, Fault]] = {
    "stopped": Fault("SIGSTOP", _one(FaultyMember.freeze), _one(FaultyMember.thaw)),
    "isolated": Fault(
        "cut off from the other members, reached by clients",
        _one(FaultyMember.isolate),
        _one(FaultyMember.rejoin),
    ),
    "cut": Fault("cut off from everybody", _one(FaultyMember.cut), _one(FaultyMember.restore)),
    "full-disk": Fault(
        "no byte left on its disk: etcd ends itself",
        _one(FaultyMember.fill_disk),
        _one(FaultyMember.empty_disk),
    ),
    "hung-disk": Fault(
        "its disk takes no write", _one(FaultyMember.hang_disk), _one(FaultyMember.resume_disk)
    ),
    "all-down": Fault(
        "kill -9 of all three",
        lambda cluster, member: cluster.kill(),
        lambda cluster, member: cluster.launch(),
        of_all=True,
    ),
}
DEFAULT: Final = ("stopped", "isolated", "cut", "full-disk")
"""A disk that hangs needs root and loop devices, and holds up every `sync` of the machine."""
