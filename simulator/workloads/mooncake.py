"""Mooncake traces: JSONL with timestamp (milliseconds), input_length, output_length, hash_ids.

A hash id names 512 tokens of the prompt and everything before them; the last one names the rest.

https://github.com/kvcache-ai/Mooncake. Prompts have up to 126K tokens: see `fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from simulator.workloads.base import EVERYTHING, Clip, Workload
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

_UNIT_TOKENS: Final = 512
FORMAT = Format("Mooncake trace", "timestamp")


def load(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read the trace in `path`; times are those of the file. Raise WorkloadError."""
    return make_workload(path, _rows(path), FORMAT, clip)


def _rows(path: Path) -> Iterator[Row]:
    for line_number, entry in read_objects(path):
        yield Row(
            line=line_number,
            request_id=f"mooncake-{line_number}",
            arrival_s=parse_seconds(
                required_field(entry, "timestamp", path, line_number), path, line_number, "timestamp"
            )
            / 1e3,
            prompt_tokens=parse_tokens(
                required_field(entry, "input_length", path, line_number), path, line_number, "input_length"
            ),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(
                required_field(entry, "output_length", path, line_number), path, line_number, "output_length"
            ),
            unit_names=_names(entry, path, line_number),
            unit_tokens=_UNIT_TOKENS,
        )


def _names(entry: Mapping[str, object], path: Path, line_number: int) -> tuple[int, ...]:
    """Return the names of whole units; empty for traces without hash ids."""
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list):
        raise field_error(path, line_number, "hash_ids", "not a list")
    units = (
        parse_tokens(
            required_field(entry, "input_length", path, line_number), path, line_number, "input_length"
        )
        // _UNIT_TOKENS
    )
    return tuple(parse_tokens(name, path, line_number, "hash_ids") for name in ids[:units])
