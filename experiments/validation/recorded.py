"""Read a recorded run of a real vLLM engine, in the format of LLMServingSim's benchmark.

A run is a directory with `meta.json` (the engine's arguments and KV cache) and `requests.jsonl` (one finished
request per line, with the engine's own timestamps). If a client recorded the timestamps, `path_s` of
`meta.json` is the time that a request and its first token spend between client and engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.bounded import read_regular


class RecordedRunError(Exception):
    """A recorded run cannot be read; the message names the file, the line and the problem."""


class _Engine(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class _KvCache(msgspec.Struct, frozen=True):
    block_size: int
    num_gpu_blocks: int


class _Hardware(msgspec.Struct, frozen=True):
    device_name: str


class _Meta(msgspec.Struct, frozen=True):
    model: str
    vllm_version: str
    engine_kwargs: _Engine
    kv_cache: _KvCache
    hardware: _Hardware
    path_s: float = 0.0


class _Line(msgspec.Struct, frozen=True):
    """`arrival_time` is from the wall clock, the others from one monotonic clock; seconds."""

    request_id: str
    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request; times are in seconds from the arrival of the first."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    first_token_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run and the engine that recorded it."""

    name: str
    model: str
    gpu: str
    vllm_version: str
    block_tokens: int
    kv_capacity_tokens: int
    max_num_seqs: int
    chunk_budget_tokens: int
    max_model_len: int
    # Seconds between client and engine, both ways, if a client recorded the timestamps.
    path_s: float
    # In the order of arrival.
    requests: tuple[RecordedRequest, ...]


def read_run(folder: Path) -> RecordedRun:
    """Read a run. Raise RecordedRunError."""
    meta = _meta(folder / "meta.json")
    return RecordedRun(
        name=folder.name,
        model=meta.model,
        gpu=meta.hardware.device_name,
        vllm_version=meta.vllm_version,
        block_tokens=meta.kv_cache.block_size,
        kv_capacity_tokens=meta.kv_cache.num_gpu_blocks * meta.kv_cache.block_size,
        max_num_seqs=meta.engine_kwargs.max_num_seqs,
        chunk_budget_tokens=meta.engine_kwargs.max_num_batched_tokens,
        max_model_len=meta.engine_kwargs.max_model_len,
        path_s=meta.path_s,
        requests=_requests(folder / "requests.jsonl"),
    )


def _meta(path: Path) -> _Meta:
    try:
        return msgspec.json.decode(read_regular(path), type=_Meta)
    except OSError as error:
        raise RecordedRunError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RecordedRunError(f"{path}: {error}") from error


def _requests(path: Path) -> tuple[RecordedRequest, ...]:
    try:
        rows = read_regular(path).splitlines()
    except OSError as error:
        raise RecordedRunError(f"{path}: {error.strerror}") from error
    lines: list[_Line] = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            line = msgspec.json.decode(row, type=_Line)
        except msgspec.DecodeError as error:
            raise RecordedRunError(f"{path}, line {number}: {error}") from error
        if line.input_toks < 1 or line.output_toks < 1:
            raise RecordedRunError(f"{path}, line {number}: a request has a prompt and an output")
        if not line.queued_ts <= line.first_token_ts <= line.last_token_ts:
            raise RecordedRunError(f"{path}, line {number}: time stamps are out of order")
        lines.append(line)
    if not lines:
        raise RecordedRunError(f"{path}: no requests")
    # Align the two clocks so that no request is queued before it arrives.
    offset_s = min(line.queued_ts - line.arrival_time for line in lines)
    lines.sort(key=lambda line: line.arrival_time)
    zero = lines[0].arrival_time
    return tuple(
        RecordedRequest(
            request_id=line.request_id,
            prompt_tokens=line.input_toks,
            output_tokens=line.output_toks,
            arrival_s=line.arrival_time - zero,
            first_token_s=line.first_token_ts - offset_s - zero,
            finish_s=line.last_token_ts - offset_s - zero,
        )
        for line in lines
    )
