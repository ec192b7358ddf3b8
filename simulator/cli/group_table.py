"""Format a comparison of policies as a table that fits the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.table import Table

from simulator.comparison import Cell, Group
from simulator.estimate import Best
from simulator.figure_text import FIGURE_FORMATS, half_text, mean_text

# In the order of display; _DROP_ORDER is the order in which columns are dropped if there is no room.
FIGURES: Final = (
    *("attainment", "goodput_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "latency_p99_s"),
    "tokens_per_s",
)
_MIGRATIONS: Final = "migrations"
_DROP_ORDER: Final = ("tpot_p50_s", "latency_p99_s", _MIGRATIONS, "tokens_per_s", "ttft_p50_s", "tpot_p99_s")
# Spaces between columns.
_GAP: Final = 2


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    heading: str
    cells: list[str]

    @property
    def width(self) -> int:
        lines = [line for text in (self.heading, *self.cells) for line in text.split("\n")]
        return max(len(line) for line in lines)


def group_table(group: Group, width: int) -> tuple[Table, list[str]]:
    """Return a table of at most `width` characters with a row per policy, and the headings that were dropped.

    A mean and its interval are side by side, or one below the other if that is too wide.
    """
    for between in (" ", "\n"):
        columns = _columns(group, between)
        if _fits(columns, width):
            return _table(columns), []
    left_out = []
    for name in _DROP_ORDER:
        dropped = next(column for column in columns if column.name == name)
        columns.remove(dropped)
        left_out.append(dropped.heading.replace("\n", " "))
        if _fits(columns, width):
            break
    return _table(columns), left_out


def _columns(group: Group, between: str) -> list[_Column]:
    columns = [_Column("", "POLICY", [cell.policy for cell in group.cells])]
    for name in FIGURES:
        best = group.best(name)
        cells = [_text(name, cell, best, between) for cell in group.cells]
        columns.append(_Column(name, _heading(FIGURE_FORMATS[name].heading, between), cells))
    counts = [f"{cell.estimate('migrations').mean:,.0f}" for cell in group.cells]
    columns.append(_Column(_MIGRATIONS, "MIGRATIONS", counts))
    return columns


def _fits(columns: list[_Column], width: int) -> bool:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1) <= width


def _table(columns: list[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.name else "left", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _text(name: str, cell: Cell, best: Best | None, between: str) -> str:
    value = cell.estimate(name)
    mean, half, mark = mean_text(name, value), half_text(name, value), _mark(best, cell)
    if between == " ":
        return f"{mean} {half}".rstrip() + mark
    # The mark next to the mean, the interval below it.
    return f"{mean}{mark}\n{half}{' ' * len(mark)}" if half else mean + mark


def _mark(best: Best | None, cell: Cell) -> str:
    if best is None:
        return "  "
    return " *" if best.name == cell.policy else " =" if cell.policy in best.tied else "  "


def _heading(text: str, between: str) -> str:
    """Split a heading where its cells are split: `TTFT` above `P99 S`."""
    return text if between == " " else text.replace(" ", "\n", 1)
