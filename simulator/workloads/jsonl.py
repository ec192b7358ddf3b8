"""Tailrace's own format: one JSON object a line, in the order of arrival.

| field | type | |
|---|---|---|
| `arrival_s` | number, not negative | seconds from the start |
| `prompt_tokens` | whole number, at least 1 | |
| `answer_tokens` | whole number, at least 1 | tokens that the user sees |
| `reasoning_tokens` | whole number; optional, 0 | tokens before the answer |
| `request_id` | text; optional, `row-<line>` | distinct in the file |

Another field is an error, so that a misspelt one does not go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from simulator.workloads.base import EVERYTHING, Clip, Workload, WorkloadError
from simulator.workloads.rows import (
    Format,
    Row,
    field_error,
    make_workload,
    parse_seconds,
    parse_tokens,
    read_objects,
    required_field,
)

FORMAT = Format("requests of", "arrival_s")
_FIELDS = frozenset({"arrival_s", "prompt_tokens", "reasoning_tokens", "answer_tokens", "request_id"})


def load(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read the requests in `path`. Raise WorkloadError."""
    return make_workload(path, _rows(path), FORMAT, clip)


def _rows(path: Path) -> Iterator[Row]:
    seen: set[str] = set()
    for line, entry in read_objects(path):
        unknown = sorted(entry.keys() - _FIELDS)
        if unknown:
            raise field_error(path, line, unknown[0], f"unknown; known are {', '.join(sorted(_FIELDS))}")
        request_id = entry.get("request_id", f"row-{line}")
        if not isinstance(request_id, str) or not request_id:
            raise field_error(path, line, "request_id", f"not a string: {request_id!r}")
        if request_id in seen:
            raise field_error(path, line, "request_id", f"{request_id!r} appears twice")
        seen.add(request_id)
        prompt, answer = (
            _at_least_one(entry, name, path, line) for name in ("prompt_tokens", "answer_tokens")
        )
        yield Row(
            line=line,
            request_id=request_id,
            arrival_s=parse_seconds(required_field(entry, "arrival_s", path, line), path, line, "arrival_s"),
            prompt_tokens=prompt,
            reasoning_tokens=parse_tokens(entry.get("reasoning_tokens", 0), path, line, "reasoning_tokens"),
            answer_tokens=answer,
        )


def _at_least_one(entry: dict[str, object], name: str, path: Path, line: int) -> int:
    number = parse_tokens(required_field(entry, name, path, line), path, line, name)
    if number == 0:
        raise field_error(path, line, name, "must be at least 1")
    return number


def write_jsonl(workload: Workload, path: Path) -> None:
    """Write `workload` so that `load` returns the same requests. Raise WorkloadError if that is
    impossible."""
    try:
        with path.open("w", encoding="utf-8") as lines:
            for request in workload.requests:
                entry = {
                    "request_id": request.request_id,
                    "arrival_s": request.arrival_s,
                    "prompt_tokens": request.prompt_tokens,
                    "reasoning_tokens": request.reasoning_tokens,
                    "answer_tokens": request.answer_tokens,
                }
                lines.write(json.dumps(entry, separators=(",", ":")) + "\n")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
