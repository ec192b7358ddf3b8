"""A local cluster in the clear, as `tailrace up --engine simulated` starts it."""

from __future__ import annotations

import sys
from typing import Final

from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import free_ports
from tailrace.local.state import RunFolder
from tailrace.service.etcd import etcd_command
from tailrace.tiny import MODEL_PATH, REASONING_PARSER

_HOST: Final = "127.0.0.1"


def clear_plan(folder: RunFolder, workers: int) -> Plan:
    """With two schedulers: what a standby passes on to the leader is input, too."""
    options = ClusterOptions(
        workers=workers,
        engine=Engine.SIMULATED,
        front=Front.RUST,
        host=_HOST,
        port=free_ports(1)[0],
        schedulers=2,
        frontends=1,
        model=str(MODEL_PATH),
        served_name="tiny",
        reasoning_parser=REASONING_PARSER,
        policy=None,
        policy_parameters={},
        cores=2,
        gpus=(),
        worker_arguments=(),
        traces="monitor",
        tls=False,
    )
    command = [sys.executable, "-m", "tailrace"]
    return make_plan(
        options,
        free_ports,
        lambda port, _: etcd_command(folder.data / "etcd", port),
        command,
        str(folder.data),
    )
