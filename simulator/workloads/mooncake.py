"""Mooncake traces: JSONL with timestamp (milliseconds), input_length, output_length; hash_ids are not used.

https://github.com/kvcache-ai/Mooncake. Prompts of up to 126K tokens: see `fit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simulator.workloads.base import Workload
from simulator.workloads.clip import EVERYTHING, Clip
from simulator.workloads.json_rows import field, objects
from simulator.workloads.rows import Format, Row, seconds, whole, workload_of

FORMAT = Format("Mooncake trace", "timestamp")


def load(path: Path, clip: Clip = EVERYTHING) -> Workload:
    """The trace in `path`; time is that of the file. Raises WorkloadError."""
    return workload_of(path, _rows(path), FORMAT, clip)


def _rows(path: Path) -> Iterator[Row]:
    for line, entry in objects(path):
        yield Row(
            line=line,
            request_id=f"mooncake-{line}",
            arrival_s=seconds(field(entry, "timestamp", path, line), path, line, "timestamp") / 1e3,
            prompt_tokens=whole(field(entry, "input_length", path, line), path, line, "input_length"),
            reasoning_tokens=0,
            answer_tokens=whole(field(entry, "output_length", path, line), path, line, "output_length"),
        )
