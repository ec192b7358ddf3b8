"""What users of kubectl and docker type without reading anything."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.brief_help import Rare
from tailrace.cli.main import main
from tailrace.cli.serve import service_command
from tailrace.service import vllm_line
from tailrace.v1 import admin_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script, serving
from tests.waiting import WAIT_S


def invoke(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], "tailrace 0"),
        (["-h"], "Usage: "),
        (["get", "-h"], "Usage: "),
        (["up", "-h"], "FLAG OF VLLM SERVE"),
    ],
)
def test_version_and_help(arguments: list[str], said: str) -> None:
    # A command keeps the help option of its first context, which in this process may be another test's.
    command = [sys.executable, "-m", "tailrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0 and said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["dran"], "Did you mean 'drain'?"), (["get", "instanse"], "Did you mean 'instances'?")],
)
def test_a_near_miss_is_suggested(arguments: list[str], said: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2 and said in output


@pytest.mark.parametrize(
    ("one", "many"),
    [("instance", "instances"), ("policy", "policies"), ("request", "requests"), ("migration", "migrations")],
)
def test_the_singular_is_taken(run: Run, one: str, many: str) -> None:
    assert run("get", one, "-o", "json").stdout == run("get", many, "-o", "json").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    code, script = invoke("completion", shell)
    assert code == 0 and "_TAILRACE_COMPLETE" in script


def test_commands_are_completed_without_loading_them() -> None:
    completing = {"_TAILRACE_COMPLETE": "bash_complete", "COMP_WORDS": "tailrace d", "COMP_CWORD": "1"}
    code = "import sys; from tailrace.cli.main import main; main(prog_name='tailrace')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=completing, capture_output=True, text=True, timeout=WAIT_S
    )
    assert [line.split(",")[1] for line in done.stdout.splitlines()] == [
        "down",
        "doctor",
        "describe",
        "drain",
    ]


def test_times_may_have_a_unit(run: Run, script: Script) -> None:
    run("set", "slo", "ttft=2s", "tpot=150ms", "qoe=0.9")
    assert script.received == [admin_pb2.SetSloRequest(slo=admin_pb2.Slo(ttft_s=2.0, tpot_s=0.15, qoe=0.9))]
    assert "'soons' is not allowed" in run("set", "slo", "ttft=soons").stderr
    assert "'0.9s' is not allowed" in run("set", "slo", "qoe=0.9s").stderr


def test_parameters_as_up_takes_them(run: Run, script: Script) -> None:
    run("set", "policy", "ares", "theta=0.2", "--set", "least_gain=0.1")
    given = {"theta": "0.2", "least_gain": "0.1"}
    assert script.received == [admin_pb2.SetPolicyRequest(name="ares", parameters=given)]


def test_describe_an_instance_and_its_requests(run: Run, script: Script) -> None:
    name = script.instances[0].instance_id
    found = json.loads(run("describe", "instance", name, "-o", "json").stdout)["instance"]
    assert found["instance_id"] == name
    assert found["requests"] == [r.request_id for r in script.requests if r.instance_id == name]
    lines = run("describe", "instances", name).stdout.splitlines()
    assert any(line.split() == ["instance_id:", name] for line in lines)


def test_describe_a_request_by_a_part_of_its_id(run: Run, script: Script) -> None:
    name = script.requests[0].request_id
    found = json.loads(run("describe", "request", name[1:], "-o", "json").stdout)["request"]
    assert found["request_id"] == name
    assert len(found["migrations"]) == len(script.migrations)
    result = run("describe", "request", "no-such")
    assert result.exit_code == 1 and "no request 'no-such'" in result.stderr


def test_logs_of_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_RUN_DIR", str(tmp_path))
    code, output = invoke("logs")
    assert code == 1 and "no local cluster was started here" in output
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("".join(f"line {n}\n" for n in range(30)) + "half")
    (tmp_path / "logs" / "worker-1.log").write_text("other\n")
    assert invoke("logs", "worker-0", "-n", "2") == (0, "line 28\nline 29\n")
    assert invoke("logs", "-n", "1") == (0, "worker-0 | line 29\nworker-1 | other\n")
    (tmp_path / "logs" / "worker-10.log").write_text("ten\n")
    assert invoke("logs", "worker-1") == (0, "other\n")
    code, output = invoke("logs", "frontend")
    assert code == 1 and "no process 'frontend'; there are worker-0, worker-1, worker-10" in output


def test_top_ends_with_q(script: Script) -> None:
    with serving(script) as address, contextlib.ExitStack() as stack:
        terminal, inside = pty.openpty()
        stack.callback(os.close, terminal)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace", "top", "--admin", address],
                stdin=inside,
                stdout=inside,
                stderr=inside,
                env={**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
            )
        finally:
            # Reading the terminal then fails once the process has it no longer open.
            os.close(inside)
        stack.callback(process.wait)
        stack.callback(process.kill)
        shown = b""
        while b"policy" not in shown:
            shown += os.read(terminal, 65_536)
        os.write(terminal, b"q")
        reader = threading.Thread(target=_read_all, args=(terminal,))
        reader.start()
        assert process.wait(timeout=WAIT_S) == 0
        reader.join(timeout=WAIT_S)


def _read_all(terminal: int) -> None:
    """Read what is written to a terminal, whose buffer is small, until nobody has it open."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65_536):
            pass


@pytest.mark.parametrize("service", ["frontend", "worker", "scheduler"])
def test_options_that_few_need_are_in_the_whole_help(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's own help would follow.
    monkeypatch.setattr(vllm_line, "find_spec", lambda name: None)
    command = service_command(service)
    brief = CliRunner().invoke(command, ["--help"]).stdout
    rare = [option for option in command.params if isinstance(option, Rare)]
    assert rare and f"{len(rare)} more options, which few need: --help=all" in brief
    whole = CliRunner().invoke(command, ["--help=all"]).stdout.split("Flags of vllm serve:")[0]
    for option in rare:
        assert f"{option.opts[-1]} " not in brief and f"{option.opts[-1]} " in whole
    assert "more options" not in whole


@pytest.mark.parametrize("group", ["get", "set", "config", "certs", "keys", "rollout"])
def test_the_help_of_a_group_cuts_no_text_off(group: str) -> None:
    shown = CliRunner().invoke(main, [group, "--help"], terminal_width=80).stdout
    assert shown.partition("Commands:")[2] and "..." not in shown.partition("Commands:")[2]
