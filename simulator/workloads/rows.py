"""Common parts of trace formats: reading a file, reporting what is wrong in it, and converting rows to
requests.

All formats:

- A file that cannot be read, is not text, or has no requests: WorkloadError.
- A malformed value (not a number, negative, missing): WorkloadError naming file, line and field.
- A row that arrives before the row above it: the same, since a trace must be in the order of arrival.
- Blank lines are skipped.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from simulator.request import SimRequest
from simulator.workloads.base import Clip, Workload, WorkloadError
from tailrace.bounded import open_regular, shown

# No request is longer, and sums over a trace stay exact.
MAX_TOKENS = 10**9
# Three years. The simulator passes through idle time too, and would not come to an end.
SPAN_MAX_S: Final = 1e8
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DIGITS: Final = 100


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format: its name and time field in messages."""

    name: str
    # The field with the time of arrival.
    time_field: str


class Row(NamedTuple):
    """One row: lengths in tokens, time in seconds; `prompt_tokens` or `answer_tokens` may still be 0."""

    line: int
    request_id: str
    arrival_s: float
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    # As in SimRequest.
    unit_names: tuple[int, ...] = ()
    unit_tokens: int = 0


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file as text. Raise WorkloadError if it cannot be read."""
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as lines:
            yield lines
    except UnicodeDecodeError as error:
        line = _first_undecodable(path)
        raise WorkloadError(f"{path}, line {line}: not a text file in UTF-8 ({error.reason})") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error


def _first_undecodable(path: Path) -> int:
    """Return the number of the first line that is not UTF-8. Text is decoded in blocks, which have none."""
    number = 1
    with suppress(UnicodeDecodeError, OSError), open_regular(path) as lines:
        for line in lines:
            line.decode()
            number += 1
    return number


def field_error(path: Path, line_number: int, field: str, problem: str) -> WorkloadError:
    """Return the error for a field of a row."""
    return WorkloadError(f"{path}, line {line_number}, field {field!r}: {problem}")


def parse_tokens(value: object, path: Path, line_number: int, field: str) -> int:
    """Parse a number of tokens from text or JSON. Raise WorkloadError."""
    number: int | None = None
    if isinstance(value, str):
        # int() itself also accepts underscores and spaces.
        number = int(value) if _WHOLE.fullmatch(value) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None:
        raise field_error(path, line_number, field, f"not a whole number: {shown(value)}")
    if number < 0:
        raise field_error(path, line_number, field, f"negative: {number}")
    if number > MAX_TOKENS:
        raise field_error(path, line_number, field, f"more than {MAX_TOKENS} tokens: {number}")
    return number


def parse_seconds(value: object, path: Path, line_number: int, field: str) -> float:
    """Parse a non-negative time from text or JSON, without converting its unit. Raise WorkloadError."""
    number = math.nan
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise field_error(path, line_number, field, f"not a number: {shown(value)}")
    if number < 0.0:
        raise field_error(path, line_number, field, f"negative: {value}")
    return number


def make_workload(path: Path, rows: Iterable[Row], form: Format, clip: Clip) -> Workload:
    """Return the workload of a trace's rows, cut by `clip`; no more rows are read than necessary.

    Rows without a prompt or an output are failed requests: they are left out, and counted in the source.
    """
    failed = 0

    def requests() -> Iterator[SimRequest]:
        nonlocal failed
        previous_s = 0.0
        for row in rows:
            if row.arrival_s < previous_s:
                problem = f"{row.arrival_s:.6f} s is before the row above it ({previous_s:.6f} s)"
                raise field_error(path, row.line, form.time_field, problem)
            previous_s = row.arrival_s
            if row.prompt_tokens and row.answer_tokens:
                yield SimRequest(
                    row.request_id,
                    row.arrival_s,
                    row.prompt_tokens,
                    row.reasoning_tokens,
                    row.answer_tokens,
                    row.unit_names,
                    row.unit_tokens,
                )
            else:
                failed += 1

    selected = clip.cut(requests())
    if not selected:
        raise WorkloadError(f"{path}: no requests{clip.describe()}")
    if selected[-1].arrival_s > SPAN_MAX_S:
        raise WorkloadError(
            f"{path}, field {form.time_field!r}: the last request arrives {selected[-1].arrival_s:.6g} s "
            f"after the start, more than {SPAN_MAX_S:.0e} s; if the times are dates, "
            "select a window with --start"
        )
    left_out = f", {failed} failed ones left out" if failed else ""
    source = f"{form.name} {path.name}: {len(selected)} requests{clip.describe()}{left_out}"
    return Workload(path.stem, selected, source)


def read_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells of `columns` in that order) for each row that is not blank.

    Other columns are ignored. Raise WorkloadError for a column that is missing or appears twice, a row with
    another number of cells than the first one, and invalid CSV.
    """
    with open_text(path) as lines:
        reader = csv.reader(lines)
        try:
            header = [name.strip() for name in next((row for row in reader if row), [])]
            if not header:
                raise WorkloadError(f"{path}: the file is empty")
            missing = [name for name in columns if name not in header]
            if missing:
                raise WorkloadError(
                    f"{path}, line {reader.line_num}: no column {', '.join(missing)}; there are {header}"
                )
            twice = [name for name in columns if header.count(name) > 1]
            if twice:
                raise WorkloadError(f"{path}, line {reader.line_num}: column {twice[0]!r} appears twice")
            indices = [header.index(name) for name in columns]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise WorkloadError(
                        f"{path}, line {reader.line_num}: {len(row)} cells for {len(header)} columns"
                    )
                yield reader.line_num, [row[index].strip() for index in indices]
        except csv.Error as error:
            raise WorkloadError(f"{path}, line {reader.line_num}: {error}") from error


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) for each line that is not blank. Raise WorkloadError for anything but an
    object."""
    with open_text(path) as lines:
        for line_number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                value: object = json.loads(text, parse_int=_whole)
            except (ValueError, RecursionError) as error:
                raise WorkloadError(f"{path}, line {line_number}: not JSON: {error}") from error
            if not isinstance(value, dict):
                raise WorkloadError(f"{path}, line {line_number}: not a JSON object")
            yield line_number, value


def _whole(digits: str) -> int | str:
    """Return a number in JSON; its text if it is longer than any that is meant, which Python may refuse."""
    return int(digits) if len(digits) <= _DIGITS else digits


def required_field(entry: Mapping[str, object], name: str, path: Path, line_number: int) -> object:
    """Return the value of a required field. Raise WorkloadError if it is missing."""
    if name not in entry:
        raise field_error(path, line_number, name, "missing")
    return entry[name]
