"""`tailrace down`: stop what `tailrace up` started."""

from __future__ import annotations

import shutil

import click

from tailrace.cli.errors import CliError
from tailrace.local.process import stop_parts
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, none_here


@click.command(epilog="Example: tailrace down")
def down() -> None:
    """Stop the local cluster of this folder, if there is one. Logs are kept."""
    folder = RunFolder.nearest()
    if not folder.path.exists():
        click.echo(none_here())
        return
    try:
        with folder.locked():
            _stop(folder)
    except (RunFolderBusy, RunFolderUnusable) as error:
        raise CliError(str(error)) from error


def _stop(folder: RunFolder) -> None:
    state = folder.read()
    stopped = stop_parts(state.parts) if state is not None else []
    folder.forget()
    shutil.rmtree(folder.data, ignore_errors=True)
    click.echo(f"stopped {', '.join(stopped)}" if stopped else none_here())
