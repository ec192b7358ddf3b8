"""Write long tables as they arrive; rich renders a table as a whole, half a millisecond per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from tailrace.cli.tables import RowT, View


def lines(view: View[RowT], chunks: Iterable[Sequence[RowT]]) -> Iterator[str]:
    """Yield the table's lines, laid out as rich lays out `view.table`, without trailing spaces.

    A column is as wide as its widest cell so far: of one chunk, all cells are known before the first is
    written.
    """
    headings = [column.heading for column in view.columns]
    widths = [cell_len(heading) for heading in headings]
    started = False
    for chunk in chunks:
        rows = [[column.text(row) for column in view.columns] for row in chunk]
        for row in rows:
            widths = [max(width, cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        if not started:
            yield _line(view, headings, widths)
            started = True
        for row in rows:
            yield _line(view, row, widths)


def _line(view: View[RowT], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        " " * (width - cell_len(cell)) + cell if column.figure else cell + " " * (width - cell_len(cell))
        for column, cell, width in zip(view.columns, cells, widths, strict=True)
    )
    return "  ".join(padded).rstrip()
