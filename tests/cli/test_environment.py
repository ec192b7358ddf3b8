"""What a user's environment and working directory have that a clean one has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tailrace.tiny import MODEL_PATH
from tests.harness.processes import FAST_FRONT
from tests.harness.working_folder import WorkingFolder
from tests.waiting import WAIT_S

# Unlike `python -m tailrace`, it does not look for modules in the working directory.
_INSTALLED: Final = str(Path(sys.executable).with_name("tailrace"))
_ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("TAILRACE_", "OTEL_"))},
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


def _run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=_ENVIRONMENT | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=WAIT_S,
    )


@pytest.mark.parametrize("name", ["tailrace.py", "random.py", "tailrace/__init__.py"])
def test_no_process_takes_a_module_of_the_working_directory(tmp_path: Path, name: str) -> None:
    module = tmp_path / name
    module.parent.mkdir(exist_ok=True)
    module.write_text("raise SystemExit('taken from the working directory')\n")
    # Its flags are checked by a process of its own, which is started as all others are.
    done = _run(_INSTALLED, "up", "--engine", "simulated", "--api-keys", "none", folder=tmp_path)
    assert done.returncode == 2 and "none: No such file" in done.stderr, done.stderr


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    closed = 'exec "$0" version <&- >&- 2>error'
    done = _run("sh", "-c", closed, _INSTALLED, folder=tmp_path)
    assert (done.returncode, (tmp_path / "error").read_text()) == (0, "")
    # A file that is opened later has the number of none of them.
    code = "import os, sys; sys.argv[1:] = ['completion', 'bash']\n"
    code += "from tailrace.cli.main import main; main(standalone_mode=False)\n"
    code += "print(os.open('opened', os.O_CREAT), file=open('number', 'w'))"
    _run("sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code, folder=tmp_path)
    assert int((tmp_path / "number").read_text()) > 2


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    refused = _run(_INSTALLED, "drain", os.fsdecode(b"w\xf6rker"), "--admin", "127.0.0.1:1", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "tailrace: 'w\\udcf6rker' is not UTF-8 in this locale (LC_ALL, LANG)\n"


def test_a_removed_working_directory_stops_only_what_needs_it(tmp_path: Path) -> None:
    removed = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$@"'
    assert _run("sh", "-c", removed, _INSTALLED, "--version", folder=tmp_path).returncode == 0
    done = _run("sh", "-c", removed, _INSTALLED, "get", "slo", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "tailrace: the working directory has been removed; go to another one\n"


@pytest.mark.fleet
def test_variables_that_are_about_others_change_no_cluster(tmp_path: Path) -> None:
    here = WorkingFolder(tmp_path)
    others = {
        "ETCD_LISTEN_CLIENT_URLS": "http://127.0.0.1:1",
        "ETCD_QUOTA_BACKEND_BYTES": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "none"),
        "VLLM_PORT": "30123",
        "VLLM_RPC_BASE_PATH": "/none",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "UVICORN_PORT": "1",
        # Of an operator who has another cluster.
        "TAILRACE_ADVERTISE": "192.0.2.1",
        "TAILRACE_CLUSTER": "other",
        "TAILRACE_ETCD": "127.0.0.1:1",
        "TAILRACE_SERVE_ARGS": "--no-such-option",
        "TAILRACE_TLS_DIR": str(tmp_path / "none"),
    }
    # Flags are checked by the commands of the parts.
    engines = ("--engine", "simulated", "--front", FAST_FRONT, "--port", str(here.port), "--api-key", "abc")
    try:
        up = _run(_INSTALLED, "up", *engines, folder=tmp_path, **others)
        assert up.returncode == 0, up.stderr
        restarted = _run(_INSTALLED, "restart", "etcd", folder=tmp_path, **others)
        assert restarted.returncode == 0, restarted.stderr
    finally:
        here.tailrace("down")


@pytest.mark.parametrize("command", [("doctor",), ("apply", "-f", "fleet.yaml")])
def test_another_users_cluster_is_named_by_its_address(command: tuple[str, ...], tmp_path: Path) -> None:
    """Its state cannot be read: here since it is a folder, as root reads every file."""
    (tmp_path / ".run" / "state.json").mkdir(parents=True)
    (tmp_path / "fleet.yaml").write_text(f"models:\n  - model: {MODEL_PATH}\n    engine: simulated\n")
    here = _run(_INSTALLED, *command, folder=tmp_path)
    assert here.returncode == 1 and "state.json" in here.stderr and "Traceback" not in here.stderr
    there = _run(_INSTALLED, *command, "--admin", "127.0.0.1:1", folder=tmp_path)
    assert "state.json" not in there.stderr + there.stdout and "Traceback" not in there.stderr
