"""`tailrace restart`: restart processes of the local cluster, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from tailrace.bounded import shown
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.local.process import PartFailed
from tailrace.local.progress import make_progress
from tailrace.local.restart import DRAIN_S, Restarted, Restarter, find_parts
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, RunState, none_here
from tailrace.numeric import Duration


@click.command(epilog="Example: tailrace restart worker-0")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="All processes, dependencies first.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Duration(min=0),
    default=DRAIN_S,
    show_default=True,
    metavar="SECONDS",
    help="How long each one may take to finish or hand over its work.",
)
def restart(names: tuple[str, ...], everything: bool, timeout_s: float) -> None:
    """Restart processes of the local cluster of this folder, one after another, while it serves.

    Each one is stopped, finishes or hands over its work, is started again with the same options, and must be
    in use before the next one is stopped. A process that has exited is started. Names are those of .run/logs.
    Ctrl-C ends the command after the process in progress.
    """
    if bool(names) == everything:
        raise UsageProblem("name the processes to restart, or pass --all")
    folder = RunFolder.nearest()
    try:
        with folder.locked():
            state = folder.read()
            if state is None or not state.ready:
                raise CliError(f"{none_here()}. tailrace up starts one here")
            parts = find_parts(state)
            unknown = [name for name in names if name not in parts]
            if unknown:
                raise CliError(f"no process {', '.join(map(shown, unknown))}; there are {', '.join(parts)}")
            asyncio.run(_restart(folder, state, names or tuple(parts), timeout_s))
    except (RunFolderBusy, RunFolderUnusable, PartFailed) as error:
        raise CliError(str(error)) from error


async def _restart(folder: RunFolder, state: RunState, names: Sequence[str], timeout_s: float) -> None:
    with make_progress(names, "tailrace restart") as progress:
        restarter = Restarter(folder, state, progress)
        took: dict[str, Restarted] = {}
        for name in names:
            took[name] = await restarter.restart(name, timeout_s)
    for name, seconds in took.items():
        click.echo(
            f"restarted {name}: {seconds.stopping_s:.1f} s to stop, {seconds.starting_s:.1f} s until in use"
        )
