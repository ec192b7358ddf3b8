"""A local cluster without TLS, as `tailrace up --engine simulated` starts it."""

from __future__ import annotations

import sys

from benchmarks.simulated_cluster import simulated_options
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import free_ports
from tailrace.local.state import RunFolder
from tailrace.service.etcd import etcd_command


def clear_plan(folder: RunFolder, workers: int) -> Plan:
    """Return a plan with two schedulers: what a standby forwards to the leader is input, too."""
    command = [sys.executable, "-m", "tailrace"]
    return make_plan(
        simulated_options(workers),
        free_ports,
        lambda port: etcd_command(folder.data / "etcd", port),
        command,
        str(folder.data),
    )
