"""`tailrace validate` on small recorded runs in the format of the real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from experiments.validation.command import validate_command
from experiments.validation.errors import metric_error
from experiments.validation.recorded import RecordedRunError, read_run
from simulator.cluster import ClusterSpec, InstanceSpec
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.intra.orders import Fcfs
from tailrace.policy.round_robin import RoundRobin
from tailrace.profiles import load_profile

PROFILE = "llama-3.1-8b-rtx4090"
# The clocks of a recorded run are unrelated.
WALL_S, MONOTONIC_S = 1_787_267_980.0, 27_536.5

META = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 4096, "seed": 42},
    "kv_cache": {"block_size": 16, "num_gpu_blocks": 100, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090", "device_count": 1},
}
REQUESTS = [
    SimRequest(f"bench-{n}", 0.1 * n, 100 + 97 * n, 0, 1 if n == 3 else 120 + 31 * n) for n in range(8)
]


def record(folder: Path, slower: float = 1.0) -> Path:
    """Write the record of an engine that is as fast as the simulator, or `slower` times as slow."""
    instance = InstanceSpec(
        "i000",
        load_profile(PROFILE),
        kv_capacity_tokens=1_600,
        host_kv_bytes=0,
        max_num_seqs=4,
        chunk_budget_tokens=256,
        max_model_len=4096,
    )
    result = simulate(ClusterSpec((instance,)), REQUESTS, RoundRobin(), Fcfs(watermark=0.0))
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(META))
    lines = []
    for finished in result.requests:
        assert finished.first_token_s is not None and finished.finish_s is not None
        line = {
            "request_id": finished.request_id,
            "input_toks": finished.prompt_tokens,
            "output_toks": finished.answer_tokens,
            "arrival_time": WALL_S + finished.arrival_s,
            "queued_ts": MONOTONIC_S + finished.arrival_s,
            "scheduled_ts": MONOTONIC_S + finished.arrival_s,
            "first_token_ts": MONOTONIC_S
            + finished.arrival_s
            + (finished.first_token_s - finished.arrival_s) * slower,
            "last_token_ts": MONOTONIC_S
            + finished.arrival_s
            + (finished.finish_s - finished.arrival_s) * slower,
        }
        lines.append(json.dumps(line))
    # Records are not in order of arrival.
    (folder / "requests.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    return folder


def run_validate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(validate_command, [str(argument) for argument in arguments])


def test_a_simulated_run_has_no_error(tmp_path: Path) -> None:
    result = run_validate(record(tmp_path / "same"), "-o", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "meta-llama/Llama-3.1-8B" and report["profile"] == PROFILE
    for metric in ("ttft", "tpot", "latency"):
        error = report["errors"][metric]
        # Timestamps of 10^9 s have a resolution of a tenth of a microsecond.
        assert error["mape"] < 1e-5 and abs(error["mean_error"]) < 1e-5
    assert report["errors"]["ttft"]["requests"] == 8
    # An output of one token has no TPOT.
    assert report["errors"]["tpot"]["requests"] == 7
    assert [request["request_id"] for request in report["requests"]] == [r.request_id for r in REQUESTS]
    assert report["preemptions"] > 0


def test_a_slower_engine_gives_an_error_of_that_size(tmp_path: Path) -> None:
    result = run_validate(record(tmp_path / "slower", slower=1.25), "-o", "json")
    errors = json.loads(result.stdout)["errors"]
    for metric in ("ttft", "tpot", "latency"):
        assert errors[metric]["mean_error"] == pytest.approx(1 / 1.25 - 1, abs=1e-4)
        assert errors[metric]["mape"] == pytest.approx(0.2, abs=1e-4)
        assert errors[metric]["p90_error"] == pytest.approx(0.2, abs=1e-4)


def test_table_output(tmp_path: Path) -> None:
    result = run_validate(record(tmp_path / "run"))
    assert result.exit_code == 0
    for word in ("TTFT", "TPOT", "latency", "MAPE", "P90", "RTX 4090", PROFILE):
        assert word in result.output


def test_a_length_penalty_is_applied_on_request(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    result = run_validate(folder, "-o", "json", "--length-penalty", "measured-rtx4090")
    assert json.loads(result.stdout)["errors"]["tpot"]["mean_error"] > 0.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"request_id": "a"}'], r"line 1: .*input_toks"),
        (["{}", "x"], r"line 1"),
        ([], r"no requests"),
        (
            [
                '{"request_id": "a", "input_toks": 5, "output_toks": 2, "arrival_time": 1.0,'
                ' "queued_ts": 3.0, "first_token_ts": 2.0, "last_token_ts": 4.0}'
            ],
            r"line 1: time stamps are out of order",
        ),
        (
            [
                '{"request_id": "a", "input_toks": 0, "output_toks": 2, "arrival_time": 1.0,'
                ' "queued_ts": 1.0, "first_token_ts": 2.0, "last_token_ts": 4.0}'
            ],
            r"line 1: a request has a prompt",
        ),
    ],
)
def test_errors_in_a_run_name_file_and_line(tmp_path: Path, lines: Sequence[str], message: str) -> None:
    folder = record(tmp_path / "run")
    (folder / "requests.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecordedRunError, match=rf"requests\.jsonl.*{message}"):
        read_run(folder)


def test_missing_files_and_names_are_reported(tmp_path: Path) -> None:
    assert "meta.json" in run_validate(tmp_path).output
    folder = record(tmp_path / "run")
    assert "no-such" in run_validate(folder, "--profile", "no-such").output
    assert "no-such" in run_validate(folder, "--length-penalty", "no-such").output
    (folder / "meta.json").write_text("{}")
    assert "model" in run_validate(folder).output


def test_a_request_that_cannot_run_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    meta = {**META, "kv_cache": {"block_size": 16, "num_gpu_blocks": 20}}
    (folder / "meta.json").write_text(json.dumps(meta))
    assert "bench-" in run_validate(folder).output


def test_errors_of_a_metric() -> None:
    error = metric_error([(1.0, 1.1), (2.0, 1.8), (4.0, 4.0)])
    assert error.mean_s == pytest.approx(7 / 3)
    assert error.mean_error == pytest.approx(6.9 / 7 - 1)
    assert error.mape == pytest.approx(0.2 / 3)
    assert error.p50_error == pytest.approx(0.1)
    with pytest.raises(ValueError, match="nothing to compare"):
        metric_error([])
