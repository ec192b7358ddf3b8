"""`tailrace logs`: what the processes of the local cluster have logged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from tailrace.bounded import shown
from tailrace.cli.errors import CliError
from tailrace.local.state import RUN_DIR_ENV, RunFolder
from tailrace.numeric import WholeRange

_POLL_S = 0.5
_SUFFIX = ".log"
# Far more than the last lines that anybody asks for.
_TAIL_BYTES = 1 << 20


@click.command(epilog="Example: tailrace logs worker-0 -f")
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("-n", "--lines", type=WholeRange(0), default=20, show_default=True, help="Last lines of each.")
def logs(name: str | None, follow: bool, lines: int) -> None:
    """Print the last lines that the processes of the local cluster have logged, or NAME alone.

    NAME is that of a process, or the beginning of one (worker). The logs outlast the cluster, until the next
    one starts. Elsewhere use journalctl -u 'tailrace-*', or docker compose logs.
    """
    folder = RunFolder.nearest().logs
    files = {file.name.removesuffix(_SUFFIX): file for file in sorted(folder.glob(f"*{_SUFFIX}"))}
    if not files:
        raise CliError(
            f"no logs in {folder}: no local cluster was started here (tailrace up starts one; {RUN_DIR_ENV} "
            "names another's .run folder)"
        )
    exact = name is not None and name in files
    chosen = {
        process: file
        for process, file in files.items()
        if name is None or process == name or (not exact and process.startswith(name))
    }
    if not chosen:
        raise CliError(f"no process {shown(name)}; there are {', '.join(files)}")
    prefixes = {process: f"{process} | " if len(chosen) > 1 else "" for process in chosen}
    read = {process: _print_new(file, 0, prefixes[process], lines) for process, file in chosen.items()}
    try:
        while follow:
            time.sleep(_POLL_S)
            for process, file in chosen.items():
                read[process] = _print_new(file, read[process], prefixes[process])
    except KeyboardInterrupt:
        return


def _print_new(file: Path, begin: int, prefix: str, most: int | None = None) -> int:
    """Print the whole lines after the first `begin` bytes, or the last `most` of them; return where they end.

    A file that has become shorter is another one, as its process has started again.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = begin if begin <= size else 0
            if most is not None:
                begin = max(begin, size - _TAIL_BYTES)
            stream.seek(begin)
            whole, newline, _ = stream.read(size - begin).rpartition(b"\n")
    except FileNotFoundError:
        return 0
    found = whole.decode(errors="replace").split("\n") if newline else []
    for line in found if most is None else found[len(found) - min(most, len(found)) :]:
        click.echo(prefix + line)
    return begin + len(whole) + len(newline)
