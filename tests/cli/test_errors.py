"""Every error is one line with the problem and what to do, and has an exit code for scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.service.channels import FROM_SERVER
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script, serving
from tests.waiting import WAIT_S


def _single_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("tailrace: ")
    return lines[0]


def test_an_unreachable_admin_api(unused_tcp_port: int) -> None:
    result = CliRunner().invoke(main, ["get", "instances", "--admin", f"127.0.0.1:{unused_tcp_port}"])
    assert result.exit_code == 3
    assert f"the admin API at 127.0.0.1:{unused_tcp_port} is unavailable" in _single_line(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "method", "code", "details", "exit_code", "message"),
    [
        (
            ("migrate", "x", "--to", "worker-9"),
            "Migrate",
            grpc.StatusCode.NOT_FOUND,
            "unknown instance worker-9",
            1,
            "unknown instance worker-9; see tailrace get requests and tailrace get instances",
        ),
        (
            ("set", "policy", "magic"),
            "SetPolicy",
            grpc.StatusCode.INVALID_ARGUMENT,
            "name: no policy 'magic'.",
            2,
            "tailrace: no policy 'magic'; tailrace get policies lists them",
        ),
        (
            ("drain", "worker-9"),
            "Drain",
            grpc.StatusCode.NOT_FOUND,
            "unknown instance worker-9",
            1,
            "tailrace get instances",
        ),
        (
            ("get", "requests"),
            "ListRequests",
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "",
            3,
            "did not respond in time",
        ),
        (("get", "stages"), "ListStages", grpc.StatusCode.UNIMPLEMENTED, "", 3, "does not serve this"),
        (("get", "stages"), "ListStages", grpc.StatusCode.INTERNAL, "bug", 1, "see the scheduler's log"),
        (("top", "--once"), "ListPolicies", grpc.StatusCode.UNAVAILABLE, "standby", 3, "standby"),
        (("trace", "x"), "GetTrace", grpc.StatusCode.NOT_FOUND, "no trace of x", 1, "no trace of x"),
    ],
)
def test_errors_of_the_server(
    run: Run,
    script: Script,
    arguments: tuple[str, ...],
    method: str,
    code: grpc.StatusCode,
    details: str,
    exit_code: int,
    message: str,
) -> None:
    script.errors[method] = (code, details)
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert message in _single_line(result.stderr)
    assert result.stdout == ""


def test_a_service_behind_the_admin_api_does_not_respond(run: Run, script: Script) -> None:
    details = "no migration service responds: deadline exceeded"
    script.errors["Migrate"] = (grpc.StatusCode.UNAVAILABLE, details)
    script.error_metadata = (FROM_SERVER,)
    result = run("migrate", "x", "--to", "worker-1")
    assert result.exit_code == 3
    assert _single_line(result.stderr) == f"tailrace: {details}"


def test_no_cluster_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TAILRACE_ADMIN", "TAILRACE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(main, ["get", "instances"])
    assert result.exit_code == 3
    assert "tailrace up" in _single_line(result.stderr)


@pytest.mark.parametrize("command", [["get", "instances"], ["down"], ["up", "--engine", "simulated"]])
def test_a_damaged_run_folder(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{")
    monkeypatch.setenv("TAILRACE_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("TAILRACE_ADMIN", raising=False)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "state.json is corrupt" in _single_line(result.stderr)


def test_several_schedulers_by_host_name(script: Script) -> None:
    with serving(script) as address:
        port = address.rpartition(":")[2]
        several = f"nobody.invalid:1,localhost:{port}"
        result = CliRunner().invoke(main, ["get", "instances", "-o", "json", "--admin", several])
        assert result.exit_code == 0, result.stderr
    unknown = CliRunner().invoke(main, ["get", "instances", "--admin", "nobody.invalid:1,none.invalid:2"])
    assert unknown.exit_code == 3
    assert "nobody.invalid:1" in _single_line(unknown.stderr)


def test_several_schedulers_of_both_address_families(script: Script) -> None:
    with serving(script) as address:
        port = address.rpartition(":")[2]
        several = f"[::1]:1,127.0.0.1:{port}"
        result = CliRunner().invoke(main, ["get", "instances", "-o", "json", "--admin", several])
        assert result.exit_code == 0, result.stderr


def test_a_bare_ipv6_address() -> None:
    result = CliRunner().invoke(main, ["get", "instances", "--admin", "::1:7101"])
    assert result.exit_code == 2
    assert "in brackets" in _single_line(result.stderr)


def test_a_certificate_folder_that_does_not_exist() -> None:
    arguments = ["get", "instances", "--admin", "127.0.0.1:1", "--tls", "/nonexistent"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "--tls: /nonexistent/ca.crt" in _single_line(result.stderr)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:99999", "a:1,b"])
def test_malformed_addresses(address: str) -> None:
    result = CliRunner().invoke(main, ["get", "instances", "--admin", address])
    assert result.exit_code == 2
    reason = "port 99999 is not from 1 to 65535" if "99999" in address else "is not HOST:PORT"
    assert reason in _single_line(result.stderr)


def test_a_missing_trace(run: Run) -> None:
    result = run("trace", "chatcmpl-aaa1")
    assert result.exit_code == 1
    assert "no spans of 'chatcmpl-aaa1'" in _single_line(result.stderr)


def test_serve_refuses_an_unknown_service(run: Run) -> None:
    result = CliRunner().invoke(main, ["serve", "butler"])
    assert result.exit_code == 2
    assert "No such command 'butler'" in result.stderr


def test_help_does_not_import_grpc() -> None:
    program = (
        "import sys\nfrom tailrace.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\nassert 'grpc' not in sys.modules, 'grpc'"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert process.returncode == 0, process.stderr
    assert "migrate" in process.stdout
