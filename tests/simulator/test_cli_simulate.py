"""`tailrace simulate`: figures, output formats and error messages."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from simulator.scenario import Scenario, SimulatedFleet, run_scenario
from simulator.workloads.resolve import WorkloadOptions
from tailrace.slo import Slo
from tests.simulator.command_lines import profile, run_cli, run_cli_ok, workload

H100, RTX = "llama-3.1-8b-h100", "llama-3.1-8b-rtx4090"


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """Return arguments for a small workload and fleet."""
    return (workload(tmp_path), "--profile", str(profile(tmp_path)), "--instances", "3")


def test_json_has_the_figures_of_the_run(small: tuple[str, ...], tmp_path: Path) -> None:
    result = run_cli_ok("simulate", "pascal", *small, "-o", "json", "--slo-ttft", 1, "--slo-tpot", 0.05)
    reply = json.loads(result.stdout)
    outcome = run_scenario(
        Scenario(
            "pascal",
            small[0],
            WorkloadOptions(),
            SimulatedFleet(str(profile(tmp_path)), 3),
            Slo(1.0, 0.05, None),
        )
    )
    assert reply["figures"] == outcome.figures.as_dict()
    assert reply["slo"] == {"ttft_s": 1.0, "tpot_s": 0.05, "qoe": None, "pace_s": None, "admit": None}
    assert reply["figures"]["requests"] == reply["figures"]["finished"] == 30
    assert reply["tail_ttft_s_by_reasoning_tokens"] == {str(at): tail for at, tail in outcome.tails.items()}


def test_table_output(small: tuple[str, ...]) -> None:
    lines = run_cli_ok("simulate", "least_loaded+fcfs", *small).stdout.splitlines()
    assert lines[0].startswith("least_loaded+fcfs on requests of w.jsonl")
    assert any(line.startswith("SLO attainment") and line.endswith("%") for line in lines)
    assert lines[-2] == "least_loaded+fcfs: order fcfs; no SLO known"
    assert lines[-1].startswith("SLO: TTFT within 2 s")


def test_csv_has_one_row(small: tuple[str, ...]) -> None:
    policy = "least_loaded+round_robin load=footprint"
    rows = list(csv.DictReader(io.StringIO(run_cli_ok("simulate", policy, *small, "-o", "csv").stdout)))
    assert len(rows) == 1
    assert rows[0]["policy"] == policy
    assert rows[0]["requests"] == "30"


def test_a_custom_policy_class(small: tuple[str, ...]) -> None:
    reply = json.loads(
        run_cli_ok("simulate", "tailrace.policy.least_loaded:LeastLoaded", *small, "-o", "json").stdout
    )
    assert reply["figures"]["finished"] == 30


def test_a_custom_policy_class_in_the_working_directory(
    small: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_here.py").write_text(
        "from tailrace.policy.session import Session\n\n\nclass Mine(Session):\n    summary = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    reply = json.loads(run_cli_ok("simulate", "mine_here:Mine", *small, "-o", "json").stdout)
    assert reply["policy"] == "mine_here:Mine"


def test_a_fleet_of_unequal_instances(small: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "unequal.html"
    unequal = (*small[:1], "--profile", f"{H100}:2,{RTX}:1", "--report", page)
    reply = json.loads(run_cli_ok("simulate", "tailrace", *unequal, "-o", "json").stdout)
    assert (reply["instances"], reply["figures"]["finished"]) == (3, 30)
    assert f"2 instances of {H100}, 1 instance of {RTX}" in page.read_text()


def test_slos_of_zero_are_always_met(small: tuple[str, ...]) -> None:
    result = run_cli_ok("simulate", "pascal", *small, "--slo-ttft", 0, "--slo-tpot", 0, "-o", "json")
    assert json.loads(result.stdout)["figures"]["attainment"] == 1.0


def test_refused_requests_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(
        '{"arrival_s": 0, "prompt_tokens": 5000, "answer_tokens": 3}\n'
        '{"arrival_s": 1, "prompt_tokens": 50, "answer_tokens": 3}\n'
    )
    result = run_cli_ok("simulate", "pascal", f"jsonl:{path}", "--profile", profile(tmp_path), "-o", "json")
    assert json.loads(result.stdout)["figures"]["refused"] == 1
    assert "1 requests were refused, the first: 5003 tokens" in result.stderr


def test_without_finished_requests_latency_is_null(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 5000, "answer_tokens": 3}\n')
    arguments = ("simulate", "pascal", f"jsonl:{path}", "--profile", profile(tmp_path))
    figures = json.loads(run_cli_ok(*arguments, "-o", "json").stdout)["figures"]
    assert figures["ttft_p99_s"] is None
    assert figures["attainment"] == 0.0
    assert "TTFT P99" in run_cli_ok(*arguments, "--report", tmp_path / "r.html").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("magic", "r1"), "tailrace: POLICY: unknown policy 'magic'; installed: ares, "),
        (("pascal", "nothing"), "tailrace: workload: unknown workload 'nothing'; generators: "),
        (("pascal", "r1"), "needs a rate"),
        (("pascal", "jsonl:/no/such/file"), "/no/such/file"),
        (("pascal", "r1", "--rate", "5", "--profile", "none"), "--profile: no profile 'none'"),
        (("pascal", "r1", "--rate", "5", "--length-penalty", "x"), "--length-penalty: no length penalty 'x'"),
        (("pascal", "r1", "--rate", "5", "--instances", "0"), "'--instances': 0 is not in the range"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:2,{RTX}"), "give NAME:COUNT for each kind"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:0,{RTX}:1"), "COUNT must be at least 1"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:0"), f"{H100}:0: COUNT must be at least 1"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:-1"), "COUNT must be at least 1"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:2,none:1"), "--profile: no profile 'none'"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:9,{RTX}:99999"), "at most 20000"),
        (("pascal", "r1", "--rate", "5", "--profile", f"{H100}:2", "--instances", "3"), "not 3"),
        (
            ("pascal", "r1", "--rate", "5", "--profile", f"{H100}:2,r1-distill-qwen-32b-h100:2"),
            "KV of different sizes per token",
        ),
        (("arrow", "r1", "--rate", "5", "--prefill-instances", "8"), "leaves no instance to decode"),
        (("pascal", "r1", "--rate", "0"), "'--rate'"),
        (("pascal", "r1", "--rate", "5", "--predict", "psychic"), "'--predict'"),
        (("pascal", "r1", "--rate", "5", "--report", "/no/such/folder/x.html"), "no folder /no/such/folder"),
        (("pascal", "r1", "--rate", "5", "--report", ""), "Is a directory; give a file to write"),
        (("pascal", "r1", "--rate", "5", "--report", "x" * 300), "File name too long"),
    ],
)
def test_usage_errors_name_the_field(arguments: tuple[str, ...], message: str) -> None:
    result = run_cli("simulate", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_the_figures_come_before_a_report_that_cannot_be_written(small: tuple[str, ...]) -> None:
    result = run_cli("simulate", "pascal", *small, "-o", "json", "--report", "/dev/full")
    assert result.exit_code == 1 and "--report: /dev/full: No space left on device" in result.stderr
    assert json.loads(result.stdout)["figures"]["requests"]


def test_requests_at_one_moment_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 50, "answer_tokens": 3}\n' * 2)
    arguments = ("simulate", "pascal", f"jsonl:{path}", "--profile", profile(tmp_path))
    figures = json.loads(run_cli_ok(*arguments, "-o", "json").stdout)["figures"]
    assert figures["rate_per_s"] is figures["goodput_per_s"] is None and figures["attainment"] == 1.0
    table = " ".join(run_cli_ok(*arguments, "--report", tmp_path / "r.html").stdout.split())
    assert "Requests 2 at -/s" in table and "Goodput - requests/s" in table
    run_cli_ok("compare", "pascal", "least_loaded", "--workload", *arguments[2:], "--seeds", "1")


def test_a_malformed_row_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(
        '{"arrival_s": 0, "prompt_tokens": 1, "answer_tokens": 1}\n'
        '{"arrival_s": 1, "prompt_tokens": 0, "answer_tokens": 1}\n'
    )
    result = run_cli("simulate", "pascal", f"jsonl:{path}")
    assert result.exit_code == 2
    assert "broken.jsonl" in result.stderr
    assert "2" in result.stderr
    assert "prompt_tokens" in result.stderr


def test_parameters_of_the_policy_and_its_batch_order(small: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("simulate", "pascal", *small, "--set", "quantum_tokens=3", "--set", "demotion_tokens=40")
    reply = json.loads(run_cli_ok(*arguments, "-o", "json").stdout)
    assert reply["parameters"] == {"quantum_tokens": 3, "demotion_tokens": 40}
    plain = json.loads(run_cli_ok("simulate", "pascal", *small, "-o", "json").stdout)
    assert plain["parameters"] == {}
    # A quantum of three tokens on a small cache gives a different schedule.
    assert reply["figures"] != plain["figures"]
    page = tmp_path / "run.html"
    first = run_cli_ok(*arguments, "--report", page).stdout.splitlines()[0]
    assert first.startswith("pascal (quantum_tokens=3, demotion_tokens=40) on ")
    assert "quantum_tokens=3, demotion_tokens=40" in page.read_text()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "quantum=3",
            "--set: policy 'pascal' has no parameter 'quantum' (did you mean 'quantum_tokens'?); its ",
        ),
        (
            "quantum_tokens=0",
            "parameter 'quantum_tokens': '0' is not allowed; it is an integer of at least 1",
        ),
        ("quantum_tokens", "'quantum_tokens' is not key=value"),
        ("arrow:prefill_share=0.5", "'arrow' is not one of pascal"),
    ],
)
def test_invalid_parameters_are_errors(small: tuple[str, ...], word: str, message: str) -> None:
    result = run_cli("simulate", "pascal", *small, "--set", word)
    assert result.exit_code == 2 and message in result.stderr


def test_qoe_depends_on_the_pace(small: tuple[str, ...]) -> None:
    def qoe(*pace: object) -> float:
        figures = json.loads(run_cli_ok("simulate", "pascal", *small, *pace, "-o", "json").stdout)["figures"]
        return float(figures["qoe_mean"])

    assert qoe("--slo-pace", 1e-4) < qoe() == qoe("--slo-pace", 0.1)
    assert qoe("--slo-tpot", 1e-4) == qoe("--slo-pace", 1e-4)
