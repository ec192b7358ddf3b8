"""`tailrace compare`: comparison of policies."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from simulator.parallel import TaskProgress
from simulator.scenario import Scenario, SimulatedFleet, run_scenario
from simulator.workloads.resolve import WorkloadOptions
from tailrace.slo import Slo
from tests.simulator.command_lines import profile, run_cli, run_cli_ok, workload
from tests.waiting import WAIT_S

# A policy with another one's batch order.
OTHER = "least_loaded+fcfs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the workload."""
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def arguments(folder: Path) -> tuple[str, ...]:
    """Return arguments for two policies, two rates, two seeds and one process."""
    return (
        *(
            "compare",
            "pascal",
            OTHER,
            "--workload",
            workload(folder, count=40),
            "--rate",
            "10",
            "--rate",
        ),
        *("20", "--seeds", "2", "--count", "20", "--profile", str(profile(folder)), "--instances", "2"),
        *("--processes", "1"),
    )


@pytest.fixture(scope="module")
def reply(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON output."""
    answer: dict[str, Any] = json.loads(run_cli_ok(*arguments, "-o", "json").stdout)
    return answer


def test_each_rate_has_a_group_with_all_policies(reply: dict[str, Any]) -> None:
    assert [group["rate_per_s"] for group in reply["groups"]] == [10.0, 20.0]
    for group in reply["groups"]:
        assert [cell["policy"] for cell in group["policies"]] == ["pascal", OTHER]
        assert all(len(cell["runs"]) == 2 for cell in group["policies"])


def test_figures_equal_those_of_single_runs(
    reply: dict[str, Any], arguments: tuple[str, ...], folder: Path
) -> None:
    # The second seed gets the second half of the trace, which begins with the 21st request.
    options = WorkloadOptions(seed=1, rate_per_s=20.0, count=20, start_s=1.0)
    scenario = Scenario(OTHER, arguments[4], options, SimulatedFleet(str(profile(folder)), 2), Slo())
    alone = run_scenario(scenario).figures.as_dict()
    assert reply["groups"][1]["policies"][1]["runs"][1] == alone


def test_means_and_intervals(reply: dict[str, Any]) -> None:
    cell = reply["groups"][0]["policies"][0]
    one, two = (single["ttft_p50_s"] for single in cell["runs"])
    assert cell["mean"]["ttft_p50_s"] == pytest.approx((one + two) / 2)
    # Two values: half of their distance times 12.706.
    assert cell["half_width"]["ttft_p50_s"] == pytest.approx(abs(one - two) / 2 * 12.706)


def test_the_best_policy_of_each_metric(reply: dict[str, Any]) -> None:
    for group in reply["groups"]:
        means = {cell["policy"]: cell["mean"]["ttft_p99_s"] for cell in group["policies"]}
        assert group["best"]["ttft_p99_s"] == min(means, key=means.__getitem__)


def test_csv_has_a_row_per_run(arguments: tuple[str, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(run_cli_ok(*arguments, "-o", "csv").stdout)))
    assert len(rows) == 8
    assert {(row["policy"], row["seed"], row["asked_rate_per_s"]) for row in rows} == {
        (policy, seed, rate) for policy in ("pascal", OTHER) for seed in "01" for rate in ("10.0", "20.0")
    }


def test_table_and_html_report(arguments: tuple[str, ...], folder: Path) -> None:
    page = folder / "compare.html"
    result = run_cli_ok(*arguments, "--report", page)
    lines = result.stdout.splitlines()
    assert sum(line.startswith("pascal ") for line in lines) == 2
    assert any("*" in line for line in lines if line.startswith(("pascal ", OTHER)))
    assert "Student's t" in lines[-2]
    assert f"report: {page}" in result.stderr
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pascal", "magic", "--workload", "r1", "--rate", "1"), "POLICY: unknown policy 'magic'"),
        (("pascal", "pascal", "--workload", "r1", "--rate", "1"), "POLICY: pascal is given twice"),
        (("pascal", "--workload", "r1", "--rate", "1", "--rate", "1"), "--rate: 1.0 is given twice"),
        (("pascal", "--workload", "r1"), "workload: r1 is generated and needs a rate: --rate N"),
        (
            ("pascal", "--workload", "agent_sesions", "--rate", "1"),
            "unknown workload 'agent_sesions' (did you mean 'agent_sessions'?)",
        ),
        (("pascal",), "'--workload'"),
        (("--workload", "r1"), "POLICY"),
    ],
)
def test_usage_errors_are_reported_before_any_run(arguments: tuple[str, ...], message: str) -> None:
    result = run_cli("compare", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_failed_run_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_policy.py").write_text(
        "from tailrace.actions import Place\n"
        "from tailrace.policy.least_loaded import LeastLoaded\n\n\n"
        "class Broken(LeastLoaded):\n"
        "    def place(self, view, arrival, now):\n"
        "        return Place('nobody')\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    policy = "broken_policy:Broken"
    result = run_cli(
        "compare", policy, "--workload", workload(folder, name="v"), "--seeds", "1", "--processes", "1"
    )
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tailrace: {policy} on jsonl:")
    assert "seed 0: SimulationError: policy Broken at place: instance_id: 'nobody'" in result.stderr


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_no_process_running(folder: Path) -> None:
    # Far more than can finish before the signal.
    command = [
        *(
            sys.executable,
            "-c",
            "from tailrace.cli.main import main; main()",
            "compare",
            "pascal",
            OTHER,
        ),
        *("--workload", "r1", "--rate", "20", "--count", "20000", "--processes", "2"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    parent = psutil.Process(process.pid)
    workers: list[psutil.Process] = []
    try:
        while not workers and process.poll() is None:
            workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
        # Like a terminal, signal the whole group.
        os.killpg(process.pid, signal.SIGINT)
        _, reply = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert reply.strip() == "Aborted!", reply
    assert workers
    assert psutil.wait_procs(workers, timeout=WAIT_S)[1] == []


def test_an_interrupted_comparison_shows_the_seeds_that_all_have_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(progress: TaskProgress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("simulator.cli.compare.task_bar", lambda label: nullcontext(interrupted))
    given = ("compare", "pascal", OTHER, "--workload", workload(folder, name="i"), "--processes", 1)
    result = run_cli(*given, "--seeds", 2)
    assert result.exit_code == 1 and result.stderr == "Aborted!\n"
    assert "; 1 of 2 seeds\n" in result.stdout and f"\n{OTHER} " in result.stdout
    assert run_cli(*given, "--seeds", 2, "-o", "json").stdout == ""


def test_parameters_for_all_policies_and_for_one(arguments: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    given = ("--set", "queued_weight=0.5", "--set", "pascal:quantum_tokens=3", "--report", page)
    reply = json.loads(run_cli_ok(*arguments, *given, "-o", "json").stdout)
    pascal, fcfs = reply["groups"][0]["policies"]
    assert pascal["parameters"] == {"queued_weight": 0.5, "quantum_tokens": 3}
    assert fcfs["parameters"] == {"queued_weight": 0.5}
    assert "queued_weight=0.5, quantum_tokens=3" in page.read_text()
    lines = run_cli_ok(*arguments, *given).stdout.splitlines()
    assert "pascal: order pascal; no SLO known; queued_weight=0.5, quantum_tokens=3" in lines
    assert "least_loaded+fcfs: order fcfs; no SLO known; queued_weight=0.5" in lines


def test_parameters_for_one_policy_override_those_for_all(arguments: tuple[str, ...]) -> None:
    given = ("--set", "pascal:queued_weight=0.25", "--set", "queued_weight=0.5", "-o", "json")
    pascal, fcfs = json.loads(run_cli_ok(*arguments, *given).stdout)["groups"][0]["policies"]
    assert (pascal["parameters"], fcfs["parameters"]) == ({"queued_weight": 0.25}, {"queued_weight": 0.5})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            f"{OTHER}:quantum_tokens=3",
            f"policy '{OTHER}' has no parameter 'quantum_tokens'; its parameters: ",
        ),
        ("pace=3", "has no parameter 'pace'"),
        ("arrow:prefill_share=1", f"'arrow' is not one of pascal, {OTHER}"),
    ],
)
def test_unknown_parameters_are_errors(arguments: tuple[str, ...], word: str, message: str) -> None:
    result = run_cli(*arguments, "--set", word)
    assert result.exit_code == 2 and message in result.stderr


def test_orders_are_crossed_and_told(folder: Path) -> None:
    crossed = (
        *(
            "compare",
            "least_loaded",
            "tailrace pulls=false",
            "arrow+earliest_due",
            "--cross",
            "--moves",
            "off",
        ),
        *("--workload", workload(folder, count=20), "--seeds", "1", "--profile", str(profile(folder))),
        *("--instances", "2", "--processes", "1"),
    )
    result = run_cli_ok(*crossed)
    told = [line for line in result.stdout.splitlines() if ": order " in line]
    placement, order = "placement (TTFT, TPOT)", "order (TTFT, TPOT, pace)"
    assert told == [
        "least_loaded+vllm: order vllm; no SLO known",
        f"least_loaded+earliest_due: order earliest_due; SLOs known to {order}",
        f"tailrace+vllm pulls=false: order vllm; SLOs known to {placement}; pulls=false, moves=false",
        f"tailrace+earliest_due pulls=false: order earliest_due; SLOs known to {placement} and {order}; "
        "pulls=false, moves=false",
        f"arrow+vllm: order vllm; SLOs known to {placement}; moves=false",
        f"arrow+earliest_due: order earliest_due; SLOs known to {placement} and {order}; moves=false",
    ]
    assert "batch orders differ" not in result.stderr
    cells = json.loads(run_cli_ok(*crossed, "-o", "json").stdout)["groups"][0]["policies"]
    assert [cell["order"] for cell in cells] == ["vllm", "earliest_due"] * 3
    assert all(cell["mean"]["migrations"] == 0 for cell in cells)


def test_different_orders_are_pointed_out(arguments: tuple[str, ...]) -> None:
    assert "batch orders differ" in run_cli_ok(*arguments).stderr


def test_equal_policies_share_their_mark_and_progress_is_shown_in_a_pipe() -> None:
    policies = ("least_loaded", "least_loaded+vllm")
    result = run_cli_ok(
        "compare", *policies, *("--workload", "r1", "--rate", "1", "--count", "5", "--seeds", "2")
    )
    assert "100 ±0 =" in result.stdout and "100 ±0 *" not in result.stdout
    assert "seeds 0 to 1" in result.stdout
    assert "comparing 4/4" in result.stderr
