"""Progress on stderr: a bar in a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from simulator.parallel import Progress


@contextmanager
def share_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar that is told the share done, from 0 to 1."""
    with _bars() as bars:
        bar = bars.add_task(label, total=1.0)
        yield lambda share: bars.update(bar, completed=share)


@contextmanager
def task_bar(label: str) -> Iterator[Callable[[Progress], None]]:
    """A bar of tasks, which also names the one that ended last."""
    with _bars() as bars:
        bar = bars.add_task(label, total=1.0)

        def told(progress: Progress) -> None:
            words = f"{label} {progress.done}/{progress.total} {progress.name}"
            bars.update(bar, completed=progress.share, description=words)

        yield told


def _bars() -> Bars:
    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
