"""What `tailrace up` shows while it waits, on stderr: a live list on a terminal, else lines."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table


class Step(enum.StrEnum):
    """How far a part is."""

    QUEUED = "waiting for its turn"
    STOPPING = "stopping"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class Progress(Protocol):
    """Told of every step of every part."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, name: str, step: Step) -> None:
        """The part of that name has come so far."""


def make_progress(names: Sequence[str], command: str = "tailrace up") -> Progress:
    """The one that suits stderr."""
    return LiveProgress(names) if sys.stderr.isatty() else PlainProgress(command)


class PlainProgress:
    """A line for each part that stops, starts or is ready."""

    def __init__(self, command: str = "tailrace up") -> None:
        self._command = command
        self._started_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to put away."""

    def show(self, name: str, step: Step) -> None:
        """Print it, unless the part only waits for its turn."""
        if step is Step.QUEUED:
            return
        if step is Step.STARTING:
            self._started_s[name] = time.monotonic()
        took = f" after {time.monotonic() - self._started_s[name]:.1f} s" if step is Step.READY else ""
        print(f"{self._command}: {name} {step}{took}", file=sys.stderr, flush=True)


class LiveProgress:
    """All parts in a list, each with its step and how long that has taken."""

    def __init__(self, names: Sequence[str]) -> None:
        self._steps = dict.fromkeys(names, Step.QUEUED)
        self._started_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live = Live(
            console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, name: str, step: Step) -> None:
        """Note it; the display follows."""
        now = time.monotonic()
        if step is Step.STARTING:
            self._started_s[name] = now
        elif name in self._started_s:
            self._took_s[name] = now - self._started_s[name]
        self._steps[name] = step

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        marks = {Step.READY: "[green]✓[/]", Step.FAILED: "[red]✗[/]", Step.QUEUED: "·"}
        for name, step in self._steps.items():
            running = time.monotonic() - self._started_s.get(name, time.monotonic())
            seconds = "" if step is Step.QUEUED else f"{self._took_s.get(name, running):.1f} s"
            table.add_row(marks.get(step, self._spinner), name, step.value, seconds)
        return table
