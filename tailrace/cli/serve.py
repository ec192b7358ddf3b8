"""`tailrace serve SERVICE`: run a service. Services are found by entry point and not imported here."""

from __future__ import annotations

import os
import shlex
from typing import Final

import click

from tailrace.cli.errors import CliError
from tailrace.collector import collector_paused
from tailrace.plugins import plugins

GROUP: Final = "tailrace.services"
EXTRA_ARGUMENTS: Final = "TAILRACE_SERVE_ARGS"
"""Environment variable with further arguments of a service, quoted as in a shell. Units and containers have a
fixed command line; this is where an operator adds a policy, a tool parser or a limit."""

# Copies of the first lines of the services' help, since importing those would import vLLM. A test compares
# the two.
_SUMMARIES: Final = {
    "console": "Serve a page that shows the fleet and acts on it through the admin API.",
    "edge": "Serve all models of the fleet at one HTTP address.",
    "frontend": "Serve the fleet to users through vLLM's own API server.",
    "migration": "Execute migrations; run a second service as a standby.",
    "monitor": "Collect worker reports and publish the cluster's state; run a second monitor as a standby.",
    "ranks": "Run an engine's ranks on another machine than its worker.",
    "scaler": "Start and stop workers of a local cluster as their load needs them (autoscale in fleet.yaml).",
    "scheduler": "Decide where requests run; run a second scheduler as a standby.",
    "worker": "Run an engine as a member of the fleet.",
}


class _Services(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
        except ValueError as error:
            raise click.UsageError(f"{EXTRA_ARGUMENTS}: {error}") from error
        return super().resolve_command(ctx, [*args, *extra])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(plugins(GROUP))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return service_command(cmd_name) if cmd_name in plugins(GROUP) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the services without importing them; a service without a summary with its location."""
        points = sorted(plugins(GROUP).items())
        with formatter.section("Services"):
            formatter.write_dl([(name, _SUMMARIES.get(name, point.value)) for name, point in points])


def service_command(name: str) -> click.Command:
    """Import and return a service's command. Raise CliError if it cannot be had."""
    point = plugins(GROUP).get(name)
    if point is None:
        raise CliError(f"serve {name}: not installed")
    try:
        with collector_paused():
            command = point.load()
    except ImportError as error:
        raise CliError(f"serve {name}: {error}; scripts/install.sh installs what is missing") from error
    if not isinstance(command, click.Command):
        raise CliError(f"serve {name}: {point.value} is not a click command")
    return command


serve = _Services(
    name="serve",
    help="Run one service in the foreground. SERVICE --help shows its options. Arguments in the environment "
    f"variable {EXTRA_ARGUMENTS} are appended.",
    epilog="Example: tailrace serve scheduler --etcd 127.0.0.1:2379 --listen 127.0.0.1:7101",
)
