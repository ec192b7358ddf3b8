"""Progress display of `tailrace up` on stderr: a live list on a terminal, else lines."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.table import Table


class Step(enum.StrEnum):
    """The state of a part."""

    QUEUED = "waiting for its turn"
    STOPPING = "stopping"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class Progress:
    """Print a line for each part that stops, starts or is ready."""

    def __init__(self, command: str = "tailrace up") -> None:
        self._command = command
        self._started_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Do nothing."""

    def show(self, name: str, step: Step) -> None:
        """Print the step, except QUEUED."""
        if step is Step.QUEUED:
            return
        if step is Step.STARTING:
            self._started_s[name] = time.monotonic()
        took = f" after {time.monotonic() - self._started_s[name]:.1f} s" if step is Step.READY else ""
        self.say(f"{name} {step}{took}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"{self._command}: {text}", file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """Show all parts in a live list, with steps and durations."""

    def __init__(self, names: Sequence[str]) -> None:
        # Imported here, since a command without a terminal needs none of them.
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        super().__init__()
        self._steps = dict.fromkeys(names, Step.QUEUED)
        self._took_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live = Live(
            console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def show(self, name: str, step: Step) -> None:
        """Record the step; the display refreshes by itself."""
        now = time.monotonic()
        if step is Step.STARTING:
            self._started_s[name] = now
        elif name in self._started_s:
            self._took_s[name] = now - self._started_s[name]
        self._steps[name] = step

    def say(self, text: str) -> None:
        """Print a line above the list."""
        self._live.console.print(text, markup=False, highlight=False)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        marks = {Step.READY: "[green]✓[/]", Step.FAILED: "[red]✗[/]", Step.QUEUED: "·"}
        for name, step in self._steps.items():
            running = time.monotonic() - self._started_s.get(name, time.monotonic())
            seconds = "" if step is Step.QUEUED else f"{self._took_s.get(name, running):.1f} s"
            table.add_row(marks.get(step, self._spinner), name, step.value, seconds)
        return table


def make_progress(names: Sequence[str], command: str = "tailrace up") -> Progress:
    """Return a live display if stderr is a terminal, else a plain one."""
    return LiveProgress(names) if sys.stderr.isatty() else Progress(command)
