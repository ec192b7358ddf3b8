"""PASCAL's cluster and the schedulers it compares (section V-A), the same for every row.

Eight H100 with 96 GB, DeepSeek-R1-Distill-Qwen-32B, 100 Gbit/s between them; preempted KV goes to host
memory. As in the paper, migrations do not overlap with decoding (a phase transition cannot be predicted), are
not limited in number, and may go to a target whose device is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from experiments.claims.pascal.circular import CircularRoundRobin
from simulator.cluster import ClusterSpec, MigrationSpec, ReportSpec
from tailrace.actions import WhenFull
from tailrace.intra.base import IntraPolicy
from tailrace.intra.orders import Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import FOOTPRINT, LeastLoaded
from tailrace.policy.pascal import ALWAYS, NEVER, Pascal
from tailrace.profiles import load_profile

INSTANCES: Final = 8
PROFILE: Final = "r1-distill-qwen-32b-h100"


@dataclass(frozen=True, slots=True)
class Arm:
    """A scheduler of the comparison: its part across instances and its part inside one."""

    policy: Callable[[], Policy]
    intra: Callable[[], IntraPolicy]
    # Seconds between an instance's reports; 0: views are exact at each decision, since the paper's "instance
    # monitor continuously collects runtime metrics" (section IV-A).
    report_s: float = 0.0


# Placement of the paper's baselines (section V-A): both RRs share instances' time, and place as FCFS does.
least_kv: Final = partial(LeastLoaded, load=FOOTPRINT)

ARMS: Final[Mapping[str, Arm]] = {
    "fcfs": Arm(least_kv, Fcfs),
    "rr": Arm(least_kv, QuantumRoundRobin),
    "rr_circular": Arm(least_kv, CircularRoundRobin),
    "pascal": Arm(Pascal, PascalQueue),
    "no_migration": Arm(partial(Pascal, migration=NEVER), PascalQueue),
    "non_adaptive": Arm(partial(Pascal, migration=ALWAYS), PascalQueue),
    "late_reports": Arm(Pascal, PascalQueue, report_s=ReportSpec().interval_s),
}


def cluster(arm: Arm) -> ClusterSpec:
    """Return the cluster of an arm; link, batch slots and block size are the simulator's defaults."""
    spec = ClusterSpec.uniform(INSTANCES, load_profile(PROFILE))
    migration = MigrationSpec(
        limit=256, queue_limit=10_000, patience_s=600.0, when_full=WhenFull.HOST, max_rounds=0
    )
    return replace(spec, migration=migration, report=replace(spec.report, interval_s=arm.report_s))
