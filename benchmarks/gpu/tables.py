"""Tables of the parts, as data, so that they can be tested without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Rows:
    """A table: its title, its columns, and rows of as many cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Said below it: what failed, what there was no time for.
    notes: Sequence[str] = ()

    def render(self) -> Table:
        """For a terminal; numbers to the right."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table
