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
    for line, entry in read_objects(path):
        yield Row(
            line=line,
            request_id=f"mooncake-{line}",
            arrival_s=parse_seconds(required_field(entry, "timestamp", path, line), path, line, "timestamp")
            / 1e3,
            prompt_tokens=parse_tokens(
                required_field(entry, "input_length", path, line), path, line, "input_length"
            ),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(
                required_field(entry, "output_length", path, line), path, line, "output_length"
            ),
            unit_names=_names(entry, path, line),
            unit_tokens=_UNIT_TOKENS,
        )


def _names(entry: Mapping[str, object], path: Path, line: int) -> tuple[int, ...]:
    """Return the names of whole units; empty for traces without hash ids."""
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list):
        raise field_error(path, line, "hash_ids", "not a list")
    units = (
        parse_tokens(required_field(entry, "input_length", path, line), path, line, "input_length")
        // _UNIT_TOKENS
    )
    return tuple(parse_tokens(each, path, line, "hash_ids") for each in ids[:units])
