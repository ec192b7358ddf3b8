"""Published traces: Azure's, BurstGPT's and Mooncake's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
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
    read_cells,
    read_objects,
    required_field,
)

_AZURE: Final = Format("Azure LLM inference trace", "TIMESTAMP")
_AZURE_COLUMNS: Final = (_AZURE.time_field, "ContextTokens", "GeneratedTokens")
_BURSTGPT: Final = Format("BurstGPT trace", "Timestamp")
_BURSTGPT_COLUMNS: Final = (_BURSTGPT.time_field, "Request tokens", "Response tokens")
_MOONCAKE: Final = Format("Mooncake trace", "timestamp")
_MOONCAKE_UNIT_TOKENS: Final = 512


def load_azure(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read a trace of 2023 or 2024; time counts from its first request. Raise WorkloadError.

    CSV with TIMESTAMP (date and time), ContextTokens, GeneratedTokens;
    https://github.com/Azure/AzurePublicDataset.
    """
    return make_workload(path, _azure_rows(path), _AZURE, clip)


def _azure_rows(path: Path) -> Iterator[Row]:
    start: datetime | None = None
    for line, (moment, prompt, output) in read_cells(path, _AZURE_COLUMNS):
        try:
            at = datetime.fromisoformat(moment)
            start = at if start is None else start
            arrival_s = (at - start) / timedelta(seconds=1)
        except (ValueError, TypeError) as error:
            raise field_error(
                path, line, _AZURE.time_field, f"not a date and time like the first: {moment!r}"
            ) from error
        yield Row(
            line=line,
            request_id=f"azure-{line}",
            arrival_s=arrival_s,
            prompt_tokens=parse_tokens(prompt, path, line, "ContextTokens"),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(output, path, line, "GeneratedTokens"),
        )


def load_burstgpt(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read a trace; times are those of the file. Raise WorkloadError.

    CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type;
    https://github.com/HPMLL/BurstGPT. Requests that failed have no response tokens and are left out. The
    files span months: with `Clip(start_s=..., duration_s=...)`, only that section is kept in memory.
    """
    return make_workload(path, _burstgpt_rows(path), _BURSTGPT, clip)


def _burstgpt_rows(path: Path) -> Iterator[Row]:
    for line, (moment, prompt, output) in read_cells(path, _BURSTGPT_COLUMNS):
        yield Row(
            line=line,
            request_id=f"burstgpt-{line}",
            arrival_s=parse_seconds(moment, path, line, _BURSTGPT.time_field),
            prompt_tokens=parse_tokens(prompt, path, line, "Request tokens"),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(output, path, line, "Response tokens"),
        )


def load_mooncake(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read a trace; times are those of the file. Raise WorkloadError.

    JSONL with timestamp (milliseconds), input_length, output_length, hash_ids. A hash id names 512 tokens of
    the prompt and everything before them; the last one names the rest. https://github.com/kvcache-ai/Mooncake.
    Prompts have up to 126K tokens: see `fit`.
    """
    return make_workload(path, _mooncake_rows(path), _MOONCAKE, clip)


def _mooncake_rows(path: Path) -> Iterator[Row]:
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
            unit_names=_unit_names(entry, path, line_number),
            unit_tokens=_MOONCAKE_UNIT_TOKENS,
        )


def _unit_names(entry: Mapping[str, object], path: Path, line_number: int) -> tuple[int, ...]:
    """Return the names of whole units; empty for traces without hash ids."""
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list):
        raise field_error(path, line_number, "hash_ids", "not a list")
    units = (
        parse_tokens(
            required_field(entry, "input_length", path, line_number), path, line_number, "input_length"
        )
        // _MOONCAKE_UNIT_TOKENS
    )
    return tuple(parse_tokens(name, path, line_number, "hash_ids") for name in ids[:units])
