"""`tailrace record`, `replay`, `set shadow` and `get shadow`."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from tailrace.actions import Place
from tailrace.cli.main import main
from tailrace.control.recording import Decided, encode, recorded_answer
from tailrace.v1 import admin_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script
from tests.control.recorded import RandomRun
from tests.waiting import WAIT_S


def replay(*arguments: str) -> Result:
    """Run `tailrace replay`, which needs no cluster."""
    return CliRunner().invoke(main, ["replay", *arguments])


@pytest.fixture
def lines() -> list[bytes]:
    """Return a recording with policy `arrow`."""
    run = RandomRun("arrow", 7)
    run.record()
    for _ in range(60):
        run.step()
    return run.lines


@pytest.fixture
def file(lines: list[bytes], tmp_path: Path) -> Path:
    """Return the recording as a file."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_record_writes_lines(run: Run, script: Script, lines: list[bytes], tmp_path: Path) -> None:
    script.recorded = lines
    path = tmp_path / "new.jsonl"
    result = run("record", str(path), "--for", "3")
    assert result.exit_code == 0 and result.stderr == f"{path}: {len(lines)} lines\n"
    assert path.read_bytes().splitlines() == lines
    assert script.received == [admin_pb2.RecordRequest(seconds=3.0)]
    assert replay(str(path)).exit_code == 0


def test_record_without_a_line_is_an_error(run: Run, tmp_path: Path) -> None:
    result = run("record", str(tmp_path / "new.jsonl"))
    assert result.exit_code == 1 and "nothing was recorded" in result.stderr


def test_record_to_an_unwritable_path_is_an_error(
    run: Run, script: Script, lines: list[bytes], tmp_path: Path
) -> None:
    script.recorded = lines
    result = run("record", str(tmp_path / "no" / "folder"))
    assert result.exit_code == 1 and "no/folder: No such file or directory" in result.stderr
    full = run("record", "/dev/full")
    assert full.exit_code == 1 and full.stderr == "tailrace: /dev/full: No space left on device\n"


def test_a_recording_that_does_not_begin_keeps_the_file(run: Run, script: Script, file: Path) -> None:
    before = file.read_bytes()
    script.stream_ends = (grpc.StatusCode.FAILED_PRECONDITION, "a recording is in progress already")
    result = run("record", str(file))
    assert result.exit_code == 1 and result.stderr == "tailrace: a recording is in progress already\n"
    assert file.read_bytes() == before


def test_a_recording_that_ends_early_is_kept(
    run: Run, script: Script, lines: list[bytes], tmp_path: Path
) -> None:
    script.recorded, script.stream_ends = lines, (grpc.StatusCode.ABORTED, "it does not lead any more")
    path = tmp_path / "new.jsonl"
    result = run("record", str(path))
    assert result.exit_code == 1
    expected = f"{path}: {len(lines)} lines, then the recording ended: it does not lead any more"
    assert result.stderr == f"tailrace: {expected}\n"
    assert path.read_bytes().splitlines() == lines
    assert replay(str(path)).exit_code == 0


def test_record_arrivals_writes_a_workload(
    run: Run, script: Script, lines: list[bytes], tmp_path: Path
) -> None:
    script.recorded = lines
    path = tmp_path / "load.jsonl"
    result = run("record", "--arrivals", str(path), "--for", "3")
    assert result.exit_code == 0, result.output
    rows = path.read_text().splitlines()
    assert re.fullmatch(
        rf"{path}: {len(rows)} requests(, \d+ unfinished, with lengths of others)?\n", result.stderr
    )
    assert json.loads(rows[0]).keys() == {"arrival_s", "prompt_tokens", "reasoning_tokens", "answer_tokens"}
    script.stream_ends = (grpc.StatusCode.ABORTED, "it does not lead any more")
    early = run("record", "--arrivals", str(path))
    assert early.exit_code == 1 and "then the recording ended: it does not lead any more" in early.stderr
    assert path.read_text().splitlines() == rows


def test_record_arrivals_without_any_keeps_the_file(run: Run, script: Script, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text("before")
    script.stream_ends = (grpc.StatusCode.FAILED_PRECONDITION, "a recording is in progress already")
    assert run("record", "--arrivals", str(path)).exit_code == 1
    script.stream_ends = None
    nothing = run("record", "--arrivals", str(path))
    assert nothing.exit_code == 1 and "record for longer" in nothing.stderr
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_record_arrivals_to_an_unwritable_path_is_an_error_at_once(
    run: Run, script: Script, tmp_path: Path
) -> None:
    folder = run("record", "--arrivals", str(tmp_path / "no" / "folder"))
    assert folder.exit_code == 1 and "no/folder: No such file or directory" in folder.stderr
    assert script.received == []
    assert run("record", "--arrivals", "/dev/full").exit_code == 1 and Path("/dev/full").is_char_device()


@pytest.mark.parametrize("arguments", [("record",), ("record", "--arrivals")])
def test_sigterm_keeps_what_was_recorded(
    run: Run, script: Script, lines: list[bytes], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    path = tmp_path / "new.jsonl"
    script.recorded = lines
    ended = threading.Event()

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.wait(WAIT_S)

    script.recording_goes_on = terminate
    result = run(*arguments, str(path))
    ended.set()
    assert result.exit_code == 0, result.output
    assert path.read_bytes() and list(tmp_path.iterdir()) == [path]


def test_replay_finds_no_difference(file: Path) -> None:
    result = replay(str(file))
    assert result.exit_code == 0 and result.stderr == ""
    assert "replayed with: the recorded policy" in result.stdout
    document = json.loads(replay(str(file), "-o", "json").stdout)
    assert document["recorded"] == document["policy"] == "arrow"
    assert set(document["points"]) >= {"place", "tick", "prefill_done"}
    assert all(point["different"] == 0 for point in document["points"].values())


def test_replay_shows_decisions_of_another_policy(file: Path) -> None:
    result = replay(str(file), "--policy", "round_robin", "--show", "1")
    assert result.exit_code == 0 and "replayed with: round_robin" in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith(("place ", "tick", "prefill_done ")) and second.startswith("    now: ")
    same = json.loads(replay(str(file), "--policy", "arrow", "--show", "0", "-o", "json").stdout)
    assert all(point["different"] == 0 for point in same["points"].values())
    assert replay(str(file), "--policy", "pascal", "--set", "quantum_tokens=7").exit_code == 0


def test_replay_fails_if_a_decision_differs(lines: list[bytes], tmp_path: Path) -> None:
    at = next(n for n, line in enumerate(lines) if b'"event":"decided","point":"place"' in line)
    lines[at] = encode(
        Decided("place", "arrow", json.loads(lines[at])["request_id"], recorded_answer(Place("x")))
    )
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join(lines))
    result = replay(str(path))
    assert result.exit_code == 1
    assert '{"place":"x","also":[]}' in result.stderr and "decisions differ" in result.stderr


def test_an_incomplete_recording_is_replayed_up_to_its_end(file: Path) -> None:
    whole = json.loads(replay(str(file), "-o", "json").stdout)
    assert whole["ends_early"] is None
    file.write_bytes(file.read_bytes()[:-20])
    result = replay(str(file), "-o", "json")
    assert result.exit_code == 0
    reason = "its last line is incomplete, as after a full disk or a killed recorder"
    assert result.stderr == f"{file}: the recording ends early: {reason}\n"
    part = json.loads(result.stdout)
    assert part["ends_early"] == reason
    decisions = [sum(point["decisions"] for point in of["points"].values()) for of in (part, whole)]
    assert 0 < decisions[0] <= decisions[1]


def test_decisions_that_were_not_recorded_any_more_are_not_compared(lines: list[bytes], file: Path) -> None:
    at = max(n for n, line in enumerate(lines) if line.startswith(b'{"event":"arrival"'))
    file.write_bytes(b"\n".join(lines[: at + 1]) + b"\n")
    result = replay(str(file))
    assert result.exit_code == 0 and result.stderr == ""


def test_a_recording_without_decisions(lines: list[bytes], file: Path) -> None:
    file.write_bytes(lines[0] + b"\n")
    result = replay(str(file))
    assert result.exit_code == 0 and result.stderr == f"{file}: no decision was recorded\n"
    assert result.stdout.startswith("no policy, 0.0 s; replayed with: the recorded policy\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "a=b"], 2, "--set requires --policy"),
        (["--policy", "nobody"], 2, "nobody"),
        (["--policy", "pascal", "--set", "quantum_tokens=x"], 2, "quantum_tokens"),
    ],
)
def test_replay_usage_errors(file: Path, arguments: list[str], code: int, message: str) -> None:
    result = replay(str(file), *arguments)
    assert result.exit_code == code and message in result.stderr


def test_replay_of_an_invalid_recording_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("hello\n")
    result = replay(str(path))
    assert result.exit_code == 1 and f"{path}: line 1: not the start of a recording" in result.stderr
    path.write_bytes(b"")
    result = replay(str(path))
    assert result.exit_code == 1 and result.stderr == f"tailrace: {path}: empty: nothing was recorded\n"
    missing = replay(str(tmp_path / "gone"))
    assert missing.exit_code == 1 and "No such file" in missing.stderr


@pytest.mark.parametrize("arguments", [(), ("--policy", "ares")])
def test_replay_without_the_recorded_policy_is_an_error(
    lines: list[bytes], file: Path, arguments: tuple[str, ...]
) -> None:
    other = [lines[0].replace(b'"arrow"', b'"ours"'), *lines[1:]]
    file.write_bytes(b"\n".join(other) + b"\n")
    result = replay(str(file), *arguments)
    assert result.exit_code == 1 and f"{file}: unknown policy 'ours'; installed: " in result.stderr


def test_replay_of_a_garbled_report_is_an_error(lines: list[bytes], file: Path) -> None:
    at = next(n for n, line in enumerate(lines) if line.startswith(b'{"event":"report"'))
    lines[at] = re.sub(rb'"report":"[^"]*"', b'"report":"AAAA"', lines[at])
    file.write_bytes(b"\n".join(lines) + b"\n")
    result = replay(str(file))
    assert result.exit_code == 1 and f"{file}: the message in Reported: " in result.stderr


def test_set_shadow(run: Run, script: Script) -> None:
    result = run("set", "shadow", "ares", "theta=0.2")
    assert result.stdout == "shadow: ares, previous: -\n"
    script.shadow.name = "ares"
    assert run("set", "shadow", "none").stdout == "shadow: -, previous: ares\n"
    request = admin_pb2.SetShadowRequest(name="ares", parameters={"theta": "0.2"})
    assert script.received == [request, admin_pb2.SetShadowRequest()]


def test_get_shadow(run: Run, script: Script) -> None:
    assert run("get", "shadow").stdout == "policy: pascal, shadow: -\n"
    script.shadow.name = "ares"
    script.shadow.counts.add(point="place", same=5, different=2)
    assert "pascal, ares in its shadow" in run("get", "shadow").stdout
    document = json.loads(run("get", "shadow", "-o", "json").stdout)["shadow"]
    assert (document["name"], document["policy"]) == ("ares", "pascal")
    assert document["counts"] == [{"point": "place", "same": 5, "different": 2, "failed": 0}]


def test_a_recording_without_placements_says_that_no_policy_was_asked(lines: list[bytes], file: Path) -> None:
    placed = (b'"event":"arrival"', b'"point":"place"')
    kept = [line for line in lines if not any(each in line for each in placed)]
    file.write_bytes(b"\n".join(kept) + b"\n")
    result = replay(str(file))
    assert "the policy was not asked to place one" in result.stderr
