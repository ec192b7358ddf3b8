"""Trace formats: parsing and error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.workloads import jsonl
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.traces import load_azure, load_burstgpt, load_mooncake

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118.5,GPT-4,417,0,417,API log
130,GPT-4,20,3,23,API log
"""
OURS = """{"arrival_s": 0.5, "prompt_tokens": 12, "answer_tokens": 3}

{"arrival_s": 2, "prompt_tokens": 4, "reasoning_tokens": 900, "answer_tokens": 5, "request_id": "mine"}
"""

Load = Callable[[Path], Workload]


def write_trace(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def rows(workload: Workload) -> list[tuple[float, int, int, int]]:
    return [
        (round(r.arrival_s, 6), r.prompt_tokens, r.reasoning_tokens, r.answer_tokens)
        for r in workload.requests
    ]


def test_azure_times_are_relative_to_the_first_request(tmp_path: Path) -> None:
    workload = load_azure(write_trace(tmp_path, AZURE))
    assert rows(workload) == [(0.0, 4808, 0, 10), (0.052, 3180, 0, 8), (60.0, 110, 0, 27)]
    assert [r.request_id for r in workload.requests] == ["azure-2", "azure-3", "azure-4"]


def test_azure_traces_of_2024_have_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n"
    assert [r.arrival_s for r in load_azure(write_trace(tmp_path, text)).requests] == [0.0, 1.0]


def test_mooncake_times_are_in_milliseconds(tmp_path: Path) -> None:
    assert rows(load_mooncake(write_trace(tmp_path, MOONCAKE))) == [(0.0, 6758, 0, 500), (3.0, 7322, 0, 490)]


def test_burstgpt_excludes_failed_requests(tmp_path: Path) -> None:
    workload = load_burstgpt(write_trace(tmp_path, BURSTGPT))
    assert rows(workload) == [(5.0, 472, 0, 18), (45.0, 1087, 0, 230), (130.0, 20, 0, 3)]
    assert "1 failed ones left out" in workload.source


def test_the_jsonl_format(tmp_path: Path) -> None:
    workload = jsonl.load(write_trace(tmp_path, OURS))
    assert rows(workload) == [(0.5, 12, 0, 3), (2.0, 4, 900, 5)]
    assert [r.request_id for r in workload.requests] == ["row-1", "mine"]


def test_reading_stops_at_the_end_of_a_window(tmp_path: Path) -> None:
    path = write_trace(tmp_path, BURSTGPT + "200,GPT-4,what,is,this,API log\n")
    workload = load_burstgpt(path, Clip(start_s=40.0, duration_s=100.0, count=2))
    assert rows(workload) == [(5.0, 1087, 0, 230), (90.0, 20, 0, 3)]
    assert "from 40 s to 140 s" in workload.source


def test_windows_line_endings_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert len(load_azure(path).requests) == 3
    path.write_bytes(b"\xef\xbb\xbf" + MOONCAKE.encode())
    assert load_mooncake(path).requests


def test_blank_lines_before_the_header_are_skipped(tmp_path: Path) -> None:
    assert len(load_azure(write_trace(tmp_path, "\n\n" + AZURE)).requests) == 3


def with_field(name: str, value: str) -> str:
    """Return a JSONL line in which the field has this JSON value, or is missing if it is empty."""
    entry: dict[str, str] = {"arrival_s": "1.0", "prompt_tokens": "2", "answer_tokens": "3"}
    entry[name] = value
    return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in entry.items() if text) + "}"


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (load_azure, "", "the file is empty"),
        (load_azure, AZURE.splitlines()[0], "no requests"),
        (load_azure, AZURE.replace("ContextTokens", "Tokens"), "line 1: no column ContextTokens"),
        (
            load_azure,
            AZURE.replace("3180", "many"),
            "line 3, field 'ContextTokens': not a whole number: 'many'",
        ),
        (load_azure, AZURE.replace("3180", "-3"), "line 3, field 'ContextTokens': negative: -3"),
        (load_azure, AZURE.replace("3180", "1_000"), "line 3, field 'ContextTokens': not a whole number"),
        (load_azure, AZURE.replace("3180", "1" * 18), "line 3, field 'ContextTokens': more than 1000000000"),
        (load_azure, AZURE.replace("3180", "1" * 9000), "line 3, field 'ContextTokens': not a whole number"),
        (load_azure, AZURE.replace("3180", ""), "line 3, field 'ContextTokens': not a whole number: ''"),
        (load_azure, AZURE.replace(",3180", ""), "line 3: 2 cells for 3 columns"),
        (load_azure, AZURE.replace("18:17:04", "25:17:04"), "line 3, field 'TIMESTAMP': not a date and time"),
        (
            load_azure,
            AZURE.replace("18:17:04.0319600", "18:17:04+00:00"),
            "line 3, field 'TIMESTAMP': not a date and time like the first",
        ),
        (load_azure, AZURE.replace("18:17:04", "18:17:03"), "line 3, field 'TIMESTAMP': .* before the row"),
        (load_azure, "\x00" + AZURE, "line 1: "),
        (
            load_azure,
            AZURE.replace("GeneratedTokens", "ContextTokens,GeneratedTokens", 1),
            "line 1: column 'ContextTokens' appears twice",
        ),
        (load_mooncake, "", "no requests"),
        (load_mooncake, MOONCAKE + "{", "line 3: not JSON"),
        (load_mooncake, "[1, 2]", "line 1: not a JSON object"),
        (load_mooncake, MOONCAKE.replace("3000", "NaN"), "line 2, field 'timestamp': not a number"),
        (load_mooncake, MOONCAKE.replace("3000", '"late"'), "line 2, field 'timestamp': not a number"),
        (load_mooncake, MOONCAKE.replace("490", "true"), "line 2, field 'output_length': not a whole number"),
        (load_mooncake, MOONCAKE.replace("output_length", "out"), "line 1, field 'output_length': missing"),
        (load_burstgpt, BURSTGPT.replace("45", "4"), "line 3, field 'Timestamp': .* before the row above it"),
        (load_burstgpt, BURSTGPT.replace("45", "-45"), "line 3, field 'Timestamp': negative"),
        (load_burstgpt, BURSTGPT.replace("230", "2.5"), "line 3, field 'Response tokens': not a whole"),
        (load_burstgpt, "Timestamp,Request tokens,Response tokens\n1,5,0\n", "no requests"),
        (jsonl.load, with_field("prompt_tokens", ""), "line 1, field 'prompt_tokens': missing"),
        (jsonl.load, with_field("prompt_tokens", "0"), "line 1, field 'prompt_tokens': must be at least 1"),
        (jsonl.load, with_field("answer_tokens", "-1"), "line 1, field 'answer_tokens': negative: -1"),
        (jsonl.load, with_field("answer_tokens", "1.5"), "line 1, field 'answer_tokens': not a whole number"),
        (jsonl.load, with_field("reasoning_tokens", "null"), "line 1, field 'reasoning_tokens': not a whole"),
        (jsonl.load, with_field("arrival_s", "1e999"), "line 1, field 'arrival_s': not a number"),
        (jsonl.load, with_field("arrival_s", "1" * 400), "line 1, field 'arrival_s': not a number"),
        (
            jsonl.load,
            with_field("answer_tokens", "1" * 9000),
            "line 1, field 'answer_tokens': not a whole number: '1+'... .9000 characters",
        ),
        (jsonl.load, with_field("reasoning", "7"), "line 1, field 'reasoning': unknown; known are"),
        (jsonl.load, with_field("request_id", "7"), "line 1, field 'request_id': not a string"),
        (
            jsonl.load,
            "\n".join([with_field("request_id", '"a"')] * 2),
            "line 2, field 'request_id': 'a' appears twice",
        ),
        (
            jsonl.load,
            with_field("arrival_s", "3") + "\n" + with_field("arrival_s", "2"),
            "line 2, field 'arrival_s': 2.000000 s is before the row above it",
        ),
    ],
)
def test_errors_name_file_line_and_field(load: Load, text: str, message: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path, text)
    with pytest.raises(WorkloadError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("load", [load_azure, load_burstgpt, load_mooncake, jsonl.load])
def test_binary_files_and_folders_are_errors(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00 no text")
    with pytest.raises(WorkloadError, match="line 1: not a text file"):
        load(path)
    path.write_bytes(b"\n\n\xff\n")
    with pytest.raises(WorkloadError, match="line 3: not a text file"):
        load(path)
    with pytest.raises(WorkloadError, match="Is a directory"):
        load(tmp_path)
