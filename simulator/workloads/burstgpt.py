"""BurstGPT traces: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log
Type.

https://github.com/HPMLL/BurstGPT. Requests that failed have no response tokens and are left out. The files
span months: with `Clip(start_s=..., duration_s=...)`, only that section is kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simulator.workloads.base import EVERYTHING, Clip, Workload
from simulator.workloads.rows import Format, Row, make_workload, parse_seconds, parse_tokens, read_cells

FORMAT = Format("BurstGPT trace", "Timestamp")
_COLUMNS = (FORMAT.time_field, "Request tokens", "Response tokens")


def load(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """Read the trace in `path`; times are those of the file. Raise WorkloadError."""
    return make_workload(path, _rows(path), FORMAT, clip)


def _rows(path: Path) -> Iterator[Row]:
    for line, (moment, prompt, output) in read_cells(path, _COLUMNS):
        yield Row(
            line=line,
            request_id=f"burstgpt-{line}",
            arrival_s=parse_seconds(moment, path, line, FORMAT.time_field),
            prompt_tokens=parse_tokens(prompt, path, line, "Request tokens"),
            reasoning_tokens=0,
            answer_tokens=parse_tokens(output, path, line, "Response tokens"),
        )
