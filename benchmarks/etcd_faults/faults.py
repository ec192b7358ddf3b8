"""The faults: what happens to one member, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.etcd_faults.cluster import FaultyMember


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one member."""

    tells: str
    inject: Callable[[FaultyMember], None]
    undo: Callable[[FaultyMember], None]


FAULTS: Final[Mapping[str, Fault]] = {
    "stopped": Fault("SIGSTOP", FaultyMember.freeze, FaultyMember.thaw),
    "isolated": Fault(
        "cut off from the other members, reached by clients", FaultyMember.isolate, FaultyMember.rejoin
    ),
    "cut": Fault("cut off from everybody", FaultyMember.cut, FaultyMember.mend),
    "full-disk": Fault(
        "no byte left on its disk: etcd ends itself", FaultyMember.fill_disk, FaultyMember.empty_disk
    ),
    "hung-disk": Fault("its disk takes no write", FaultyMember.hang_disk, FaultyMember.resume_disk),
}
DEFAULT: Final = ("stopped", "isolated", "cut", "full-disk")
"""A disk that hangs needs root and loop devices, and holds up every `sync` of the machine."""
