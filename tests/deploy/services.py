"""What a deployed service's command line is parsed to, and how long the service takes to stop."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from edge_svc.main import Settings as EdgeSettings
from frontend_svc.settings import Settings
from migration_svc.migration import CopyRules
from migration_svc.slots import MigrationSlots
from tailrace.cli.serve import serve
from tailrace.handover import SETTLE_S
from tests.waiting import WAIT_S
from worker_agent.draining import HANDOVER_S
from worker_agent.settings import WorkerSettings

# For closing after the drain (tailrace.service.runtime).
_CLOSE_S: Final = 15.0
_DRAIN_S: Final = {
    "frontend": Settings().drain_timeout_s,
    "edge": EdgeSettings().drain_timeout_s,
    "worker": WorkerSettings().drain_timeout_s + HANDOVER_S,
    "migration": MigrationSlots().max_wait_s + CopyRules().room_wait_s + CopyRules().timeout_s + SETTLE_S,
}


def parse_serve(arguments: Sequence[str]) -> None:
    """Parse SERVICE OPTION... as `tailrace serve` would, without running it. Raise click.UsageError."""
    context = click.Context(serve, info_name="serve")
    name, command, rest = serve.resolve_command(context, list(arguments))
    assert command is not None
    command.make_context(name, rest, parent=context)


def assert_systemd_accepts(folder: Path) -> None:
    """Check the units in a folder by systemd's verifier, which requires their programs to exist."""
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(map(str, folder.iterdir()))],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    # Messages about units of the machine are allowed; ones about these units are not.
    assert result.returncode == 0, result.stderr
    assert "tailrace" not in result.stderr


def longest_s(service: str) -> float:
    """Return the maximum stop time in seconds of a service, given its unit or container name."""
    kind = next((kind for kind in _DRAIN_S if service.removeprefix("tailrace-").startswith(kind)), "")
    return _DRAIN_S.get(kind, 0.0) + _CLOSE_S
