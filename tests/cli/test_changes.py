"""`tailrace set`, `migrate` and `drain`: requests to the server, and output."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from tailrace.v1 import admin_pb2, types_pb2, worker_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script


def test_set_policy(run: Run, script: Script) -> None:
    result = run("set", "policy", "least_loaded", "-o", "json")
    assert json.loads(result.stdout) == {
        "policy": "least_loaded",
        "parameters": {},
        "previous": "pascal",
        "previous_parameters": {"quantum_tokens": "200"},
    }
    assert script.received == [admin_pb2.SetPolicyRequest(name="least_loaded")]


def test_set_policy_with_parameters(run: Run, script: Script) -> None:
    result = run("set", "policy", "ares", "theta=0.2", "least_gain=0.1")
    assert result.stdout == "policy: ares least_gain=0.1 theta=0.2, previous: pascal quantum_tokens=200\n"
    given = {"theta": "0.2", "least_gain": "0.1"}
    assert script.received == [admin_pb2.SetPolicyRequest(name="ares", parameters=given)]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["theta"], "'theta' is not key=value"), (["theta=1", "theta=2"], "'theta' is given twice")],
)
def test_set_policy_requires_assignments(run: Run, script: Script, words: list[str], message: str) -> None:
    result = run("set", "policy", "ares", *words)
    assert result.exit_code == 2 and message in result.stderr
    assert script.received == []


def test_set_slo(run: Run, script: Script) -> None:
    result = run("set", "slo", "ttft=3", "qoe=0.95", "pace=0")
    assert result.stdout == "slo: ttft=3s qoe=0.95, previous: ttft=2s tpot=150ms\n"
    assert script.received == [admin_pb2.SetSloRequest(slo=admin_pb2.Slo(ttft_s=3.0, qoe=0.95, pace_s=0.0))]
    document = json.loads(run("set", "slo", "tpot=0.1", "-o", "json").stdout)
    assert document["previous"] == {"ttft_s": 2.0, "tpot_s": 0.15, "qoe": None, "pace_s": None, "admit": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed=1"], "slo has no parameter 'speed'; its parameters: admit, pace, qoe, tpot, ttft"),
        (["qoe=95"], "slo, parameter 'qoe': '95' is not allowed; it is a number from 0 to 1"),
        (["ttft=soon"], "'ttft': 'soon' is not allowed"),
    ],
)
def test_set_slo_refuses_invalid_values(run: Run, script: Script, words: list[str], message: str) -> None:
    result = run("set", "slo", *words)
    assert result.exit_code == 2 and message in result.stderr
    assert script.received == []


def test_get_slo(run: Run) -> None:
    assert run("get", "slo").stdout == "ttft=2s tpot=150ms\n"
    slo = {"ttft_s": 2.0, "tpot_s": 0.15, "qoe": None, "pace_s": None, "admit": None}
    assert json.loads(run("get", "slo", "-o", "json").stdout) == {"slo": slo}


def test_set_pool(run: Run, script: Script) -> None:
    result = run("set", "pool", "worker-0", "prefill")
    assert result.stdout == "instance: worker-0, pool: prefill, previous: decode\n"
    assert script.received == [admin_pb2.SetPoolRequest(instance_id="worker-0", pool=types_pb2.POOL_PREFILL)]


def test_set_pool_none_removes_an_instance_from_its_pool(run: Run, script: Script) -> None:
    assert run("set", "pool", "worker-0", "none").exit_code == 0
    assert script.received == [admin_pb2.SetPoolRequest(instance_id="worker-0")]


def test_set_pool_lists_the_pools(run: Run, script: Script) -> None:
    result = run("set", "pool", "worker-0", "fast")
    assert result.exit_code == 2
    assert "prefill_to_decode" in result.stderr
    assert script.received == []


def test_set_stages_from_a_file_and_from_stdin(run: Run, script: Script, tmp_path: Path) -> None:
    text = json.dumps([{"lo": 0, "hi": 512, "instance_ids": ["worker-0"]}])
    file = tmp_path / "stages.json"
    file.write_text(text)
    expected = admin_pb2.SetStagesRequest(stages=[types_pb2.Stage(lo=0, hi=512, instance_ids=["worker-0"])])
    assert run("set", "stages", str(file)).exit_code == 0
    assert run("set", "stages", "-", stdin=text).exit_code == 0
    assert script.received == [expected, expected]


def test_set_stages_names_the_invalid_field(run: Run, script: Script) -> None:
    result = run("set", "stages", "-", stdin='[{"lo": "x", "hi": 1, "instance_ids": []}]')
    assert result.exit_code == 2
    assert "stages[0].lo" in result.stderr
    assert script.received == []


def test_set_stages_refuses_values_out_of_range(run: Run, script: Script) -> None:
    result = run("set", "stages", "-", stdin='[{"lo": -1, "hi": 1, "instance_ids": []}]')
    assert result.exit_code == 2
    assert "stages[0].lo" in result.stderr
    assert script.received == []


def test_migrate_prints_rounds_bytes_and_pause(run: Run, script: Script) -> None:
    result = run("migrate", "chatcmpl-aaa1", "--to", "worker-1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "chatcmpl-aaa1 is on worker-1 (epoch 1, reasoning, 640 tokens): 2 rounds, 3.0 MiB, "
        "paused 4.2 ms = 1.5 decode steps\n"
    )
    assert result.stderr.splitlines() == [
        "pre_copy: worker-0 -> worker-1",
        "round 1: blocks 38, 2.0 MiB, 8.0 ms",
        "committed: worker-0 -> worker-1",
        "round 2: blocks 2, 1.0 MiB, 2.0 ms",
    ]
    request = script.received[-1]
    assert isinstance(request, admin_pb2.AdminMigrateRequest)
    assert request.mode == worker_pb2.COPY_MODE_PRE_COPY
    assert request.target_instance_id == "worker-1"


def test_migrate_json_is_the_last_record(run: Run) -> None:
    result = run("migrate", "aaa1", "--to", "worker-1", "--mode", "stop-and-copy", "-o", "json")
    record = json.loads(result.stdout)
    assert record["state"] == "committed"
    assert (record["bytes"], record["pause_ms"], record["pause_steps"]) == (3 * 2**20, 4.25, 1.5)


def test_migrate_passes_partial_request_ids_to_the_server(run: Run, script: Script) -> None:
    assert run("migrate", "aaa1", "--to", "worker-1").exit_code == 0
    (request,) = script.received
    assert isinstance(request, admin_pb2.AdminMigrateRequest)
    assert request.request_id == "aaa1"


def test_migrate_aborted_is_an_error(run: Run, script: Script) -> None:
    last = script.migrate_events[-1]
    last.state = types_pb2.MIGRATION_STATE_ABORTED
    last.error = "checksum of block 7 differs"
    result = run("migrate", "aaa1", "--to", "worker-1", "-o", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["state"] == "aborted"
    assert "checksum of block 7 differs; the request continues where it was" in result.stderr


def test_drain_waits_until_the_instance_is_empty(run: Run, script: Script) -> None:
    result = run("drain", "worker-0")
    assert result.exit_code == 0
    assert "worker-0: 2 requests left" in result.stderr
    assert "worker-0 is empty" in result.stdout
    assert script.received == [admin_pb2.DrainRequest(instance_id="worker-0")]


def test_drain_json(run: Run) -> None:
    result = run("drain", "worker-0", "-o", "json")
    assert json.loads(result.stdout) == {
        "instance": "worker-0",
        "draining": True,
        "remaining": 0,
        "done": True,
    }


def test_undrain(run: Run, script: Script) -> None:
    assert "takes new requests again" in run("drain", "worker-0", "--undrain").stdout
    assert script.received == [admin_pb2.DrainRequest(instance_id="worker-0", undrain=True)]


def test_a_drain_that_takes_too_long_is_an_error(run: Run, script: Script) -> None:
    del script.drain_events[1:]
    script.stream_ends = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    result = run("drain", "worker-0", "--timeout", "20")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "tailrace: worker-0: not empty after 20 s (2 requests left); the drain continues, "
        "and the same command waits for it again"
    )


def test_an_interrupted_drain_is_an_error(run: Run, script: Script) -> None:
    del script.drain_events[1:]
    result = run("drain", "worker-0")
    assert result.exit_code == 1
    assert "the drain continues" in result.stderr
