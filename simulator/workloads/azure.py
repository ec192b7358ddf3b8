"""Azure LLM inference traces (2023, and 2024 with the same columns).

CSV with TIMESTAMP (date and time), ContextTokens, GeneratedTokens;
https://github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from simulator.workloads.base import EVERYTHING, Clip, Workload
from simulator.workloads.rows import Format, Row, field_error, make_workload, parse_tokens, read_cells

FORMAT = Format("Azure LLM inference trace", "TIMESTAMP")
_COLUMNS = (FORMAT.time_field, "ContextTokens", "GeneratedTokens")


def load(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read the trace in `path`; time counts from its first request. Raise WorkloadError."""
    return make_workload(path, _rows(path), FORMAT, clip)


def _rows(path: Path) -> Iterator[Row]:
    start: datetime | None = None
    for line, (moment, prompt, output) in read_cells(path, _COLUMNS):
        try:
            at = datetime.fromisoformat(moment)
            start = at if start is None else start
            arrival_s = (at - start) / timedelta(seconds=1)
        except (ValueError, TypeError) as error:
            raise field_error(
                path, line, FORMAT.time_field, f"not a date and time like the first: {moment!r}"
            ) from error
        yield Row(
            line=line,
            request_id=f"azure-{line}",
            arrival_s=arrival_s,
            prompt_tokens=parse_tokens(prompt, path, line, "ContextTokens"),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(output, path, line, "GeneratedTokens"),
        )
