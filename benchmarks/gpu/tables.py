"""Tables as data, so that they can be tested without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Rows:
    """A table: title, columns, and rows with as many cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Printed below it: failures, and what was skipped for lack of time.
    notes: Sequence[str] = ()

    def render(self) -> Table:
        """Return the table for a terminal; numbers are right-aligned."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table
