"""Rows of a CSV file, by the names in its first line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from simulator.workloads.base import WorkloadError
from simulator.workloads.rows import reading


def cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(line, the cells of `columns` in that order) for each row that is not blank.

    Other columns may be there and are ignored. Raises WorkloadError for a missing column, a row with fewer or
    more cells than the first line, and what is no CSV.
    """
    with reading(path) as lines:
        reader = csv.reader(lines)
        try:
            header = [name.strip().removeprefix("\ufeff") for name in next(reader, [])]
            if not header:
                raise WorkloadError(f"{path}: the file is empty")
            missing = [name for name in columns if name not in header]
            if missing:
                raise WorkloadError(f"{path}, line 1: no column {', '.join(missing)}; there are {header}")
            places = [header.index(name) for name in columns]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise WorkloadError(
                        f"{path}, line {reader.line_num}: {len(row)} cells for {len(header)} columns"
                    )
                yield reader.line_num, [row[place].strip() for place in places]
        except csv.Error as error:
            raise WorkloadError(f"{path}, line {reader.line_num}: {error}") from error
