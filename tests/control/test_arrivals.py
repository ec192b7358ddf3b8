"""The load in a recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.workloads import jsonl
from tailrace.cluster import Arrival
from tailrace.control.arrivals import NothingEndedError, RecordedLoad
from tailrace.control.events import Arrived, Reported
from tailrace.control.recording import BrokenOff, decode
from tailrace.v1 import monitor_pb2
from tests.control.recorded import RandomRun
from tests.scheduler.facts import GONE, event, request, steady


def arrive(load: RecordedLoad, request_id: str, now_s: float, **asked: object) -> None:
    """Add an arrival."""
    load.add(Arrived(Arrival(request_id, 100, 1_000, **asked), now_s, 1e9 + now_s))  # type: ignore[arg-type]


def report(load: RecordedLoad, message: monitor_pb2.WorkerReport) -> None:
    """Add a worker's report."""
    load.add(Reported(message, True, 0.0, 0.0))


def finish(load: RecordedLoad, request_id: str, output_tokens: int, reasoning_tokens: int = 0) -> None:
    """Add the end of a request."""
    message = event("a", request_id, GONE, output_tokens=output_tokens)
    answered = monitor_pb2.Answered(ttft_s=0.1, qoe=1.0, reasoning_tokens=reasoning_tokens)
    message.phase_events[0].answered.CopyFrom(answered)
    report(load, message)


def test_finished_requests_have_their_own_lengths() -> None:
    load = RecordedLoad()
    arrive(load, "one", 1.5)
    arrive(load, "two", 2.0)
    finish(load, "two", 30, 12)
    finish(load, "one", 7)
    assert list(load.rows()) == [
        {"arrival_s": 1.5, "prompt_tokens": 100, "reasoning_tokens": 0, "answer_tokens": 7},
        {"arrival_s": 2.0, "prompt_tokens": 100, "reasoning_tokens": 12, "answer_tokens": 18},
    ]
    assert (load.unfinished, load.models) == (0, 1)


def test_what_ran_before_and_what_is_placed_anew_has_not_arrived() -> None:
    load = RecordedLoad()
    arrive(load, "here", 0.0)
    arrive(load, "here", 1.0)
    arrive(load, "before", 1.0, admitted=True)
    arrive(load, "continued", 2.0, output_tokens=5)
    finish(load, "before", 3)
    finish(load, "here", 9)
    assert [row["arrival_s"] for row in load.rows()] == [0.0]


def test_an_unfinished_request_gets_the_lengths_of_one_at_least_as_long() -> None:
    load = RecordedLoad()
    for request_id in ("short", "long", "cut", "refused"):
        arrive(load, request_id, 0.0)
    finish(load, "short", 5)
    finish(load, "long", 50, 20)
    report(load, steady("a", [request("cut", output_tokens=10)]))
    # Moved away or aborted: no end of it is known.
    report(load, event("a", "cut", GONE, output_tokens=0))
    rows = list(load.rows())
    assert load.unfinished == 2
    assert (rows[2]["reasoning_tokens"], rows[2]["answer_tokens"]) == (20, 30)
    assert rows[3]["answer_tokens"] in (5, 30)
    # Repeatable.
    assert list(load.rows()) == rows


def test_an_unfinished_request_longer_than_all_has_its_own_length() -> None:
    load = RecordedLoad()
    arrive(load, "short", 0.0)
    arrive(load, "cut", 0.0)
    finish(load, "short", 5)
    report(load, steady("a", [request("cut", output_tokens=10)]))
    assert list(load.rows())[1]["answer_tokens"] == 10


def test_nothing_is_known_without_a_finished_request() -> None:
    load = RecordedLoad()
    with pytest.raises(NothingEndedError, match="record for longer"):
        list(load.rows())
    load.add(BrokenOff())
    assert load.ends_early


def test_a_recording_becomes_a_workload(tmp_path: Path) -> None:
    run = RandomRun("least_loaded", 3)
    for _ in range(40):
        run.step()
    run.record()
    before = run.count
    for _ in range(400):
        run.step()
    load = RecordedLoad()
    for line in decode(run.lines):
        load.add(line)
    path = tmp_path / "load.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in load.rows()))
    workload = jsonl.load(path)
    assert len(workload.requests) == len(load) == run.count - before
    assert 0 < load.unfinished < len(load)
    assert workload.requests[-1].arrival_s <= run.now_s - 100.0
