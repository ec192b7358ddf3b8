"""Objects of a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from simulator.workloads.base import WorkloadError
from simulator.workloads.rows import reading, wrong


def objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line, object) for each line that is not blank. Raises WorkloadError for what is no object."""
    with reading(path) as lines:
        for line, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                value: object = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise WorkloadError(f"{path}, line {line}: not JSON: {error}") from error
            if not isinstance(value, dict):
                raise WorkloadError(f"{path}, line {line}: not a JSON object")
            yield line, value


def field(entry: Mapping[str, object], name: str, path: Path, line: int) -> object:
    """The value of a field that must be there. Raises WorkloadError."""
    if name not in entry:
        raise wrong(path, line, name, "missing")
    return entry[name]
