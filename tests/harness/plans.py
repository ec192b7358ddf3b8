"""Plans of local clusters with simulated engines, started for a block as `tailrace up` starts them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.local.progress import Progress, Step
from tailrace.local.start import Settings, Starter
from tailrace.local.state import RunFolder, RunState
from tailrace.service.etcd import etcd_command
from tailrace.tiny import MODEL_PATH

MODEL: Final = "tiny"


class NoProgress(Progress):
    """A progress display that shows nothing."""

    def show(self, name: str, step: Step) -> None:
        """Do nothing."""


@asynccontextmanager
async def started(
    plan: Plan, folder: RunFolder, progress: Progress, *, cores: int = 2
) -> AsyncIterator[RunState]:
    """Run the plan's processes for the block. Raise PartFailed or TimeoutError if they do not start."""
    starter = Starter(plan, folder, progress, cores)
    with progress:
        state = await starter.run(Settings(), MODEL)
    try:
        yield state
    finally:
        starter.stop()


def simulated_plan(
    folder: RunFolder, workers: int, *, tls: bool = False, etcd: Callable[[int], Sequence[str]] | None = None
) -> Plan:
    """Return the plan of `tailrace up --engine simulated`, with vLLM's Rust API server and two schedulers,
    since a standby forwards calls.

    `etcd`: returns the command of an etcd on a port; None: one without TLS.
    """
    options = ClusterOptions(
        workers=workers,
        engine=Engine.SIMULATED,
        front=Front.RUST,
        host=LOOPBACK,
        port=free_ports(1)[0],
        schedulers=2,
        frontends=1,
        model=str(MODEL_PATH),
        policy_parameters={},
        cores=2,
        gpus=(),
        traces="monitor",
        tls=tls,
    )
    return make_plan(
        options,
        free_ports,
        etcd or (lambda port: etcd_command(folder.data / "etcd", port)),
        [sys.executable, "-m", "tailrace"],
        str(folder.data),
    )
