"""`tailrace up` and `down`: a complete cluster of simulated engines, and failures at start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.local.state import RunFolder, RunState
from tests.harness.processes import FAST_FRONT
from tests.harness.tries import TRIES
from tests.harness.working_folder import WorkingFolder
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

# Without the pacer, with which answers come at reading pace.
_PARAMETERS = ("--set", "quantum_tokens=200", "--set", "pacer=false")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down")


def test_a_complete_cluster(here: WorkingFolder) -> None:
    result = here.up("--workers", "2", "--sim=speed=2", "--policy", "pascal", *_PARAMETERS)
    assert result.returncode == 0, result.stderr
    state = here.state()
    assert state.ready
    assert state.admin in result.stdout
    assert str(here.folder.logs) in result.stdout

    curl = next(line.strip() for line in result.stdout.splitlines() if line.strip().startswith("curl"))
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=WAIT_S)
    assert answer.returncode == 0, answer.stderr
    events = [line.removeprefix("data: ") for line in answer.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert any(delta.get("reasoning") for delta in deltas)
    assert any(delta.get("content") for delta in deltas)

    instances = json.loads(here.tailrace("get", "instances", "-o", "json").stdout)["instances"]
    assert [instance["instance_id"] for instance in instances] == ["worker-0", "worker-1"]
    policies = json.loads(here.tailrace("get", "policies", "-o", "json").stdout)["policies"]
    (active,) = (policy for policy in policies if policy["active"])
    values = {parameter["name"]: parameter["value"] for parameter in active["parameters"]}
    assert (active["name"], values["quantum_tokens"], values["behind_tokens"]) == ("pascal", 200, 1.0)
    assert "worker-1" in here.tailrace("top", "--once").stdout

    again = here.up("--sim=speed=2", "--workers", "2", "--policy", "pascal", *_PARAMETERS)
    assert again.returncode == 0
    assert "already up" in again.stderr
    again = here.up("--workers", "3")
    assert again.returncode == 1
    assert (
        "already up, with other flags (tailrace up " in again.stderr and "Tailrace is up" not in again.stdout
    )
    assert here.state() == state
    elsewhere = WorkingFolder(here.path.parent)
    elsewhere.port = here.port
    taken = elsewhere.up()
    assert f"in use by the Tailrace cluster of {here.path};" in taken.stderr
    below = here.path / "below"
    below.mkdir()
    assert WorkingFolder(below).tailrace("logs", "worker-0").returncode == 0

    example = here.run(sys.executable, "-m", "examples.kill_a_worker", "--svg", "picture.svg")
    assert example.returncode == 0, example.stdout + example.stderr
    assert re.search(r"migrated worker-\d -> worker-\d with its KV cache", example.stdout)
    assert "text and usage equal to the undisturbed answer: yes" in example.stdout
    assert "restarted worker-" in example.stdout
    assert "<svg" in (here.path / "picture.svg").read_text()

    url = re.search(r"console +(http://\S+)", result.stdout)
    assert url is not None
    _wait(lambda: _answers(f"{url[1]}health"), "the console")
    console = next(part for part in here.state().parts if part.name == "console")
    os.kill(console.identity.pid, signal.SIGKILL)
    _wait(lambda: not console.identity.alive(), "the console to end")
    assert here.tailrace("up").returncode == 0  # it serves without
    assert here.tailrace("restart", "console").returncode == 0
    assert _answers(f"{url[1]}health")

    state = here.state()
    worker = next(part for part in state.parts if part.name == "worker-0")
    os.kill(worker.identity.pid, signal.SIGKILL)
    _wait(lambda: not worker.identity.alive(), "worker-0 to end")
    incomplete = here.up()
    assert incomplete.returncode == 1
    assert "incomplete (worker-0 ended); tailrace restart worker-0 starts" in incomplete.stderr

    down = here.tailrace("down")
    assert down.returncode == 0, down.stderr
    assert "worker-1" in down.stdout
    assert not any(part.identity.session_members() for part in state.parts)
    assert here.tailrace("down").stdout.startswith(f"no local cluster is running in {here.path} or")
    assert here.tailrace("get", "instances").returncode == 3


def test_a_port_in_use(here: WorkingFolder) -> None:
    with socket.create_server(("127.0.0.1", here.port)):
        result = here.up()
    assert result.returncode == 1
    assert f"port {here.port} on 127.0.0.1 is in use" in result.stderr
    assert f"--port {here.port + 1}" in result.stderr
    assert here.folder.read() is None


def test_a_full_disk_is_reported_and_nothing_is_left_running(here: WorkingFolder) -> None:
    # The state cannot be written, so the started processes are stopped.
    result = here.run(
        "prlimit", "--fsize=100:100", *here.command("up", "--engine", "simulated", "--port", str(here.port))
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"tailrace: {here.folder.path}: File too large (TAILRACE_RUN_DIR names another folder)"
    )
    assert "Traceback" not in result.stderr
    assert here.folder.read() is None
    commands = [file.read_text() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not [command for command in commands if str(here.folder.path) in command]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_small_disk_is_reported_before_anything_starts(here: WorkingFolder) -> None:
    # Otherwise etcd would fail with a stack trace.
    here.folder.path.mkdir()
    if here.run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(here.folder.path)).returncode:
        pytest.skip("cannot mount a small disk")
    try:
        result = here.up()
        assert result.returncode == 1
        assert re.fullmatch(
            rf"tailrace: {here.folder.path}: 4 MB free; a local cluster needs 100 MB \(TAILRACE_RUN_DIR .*\n",
            result.stderr,
        )
    finally:
        here.run("umount", "--lazy", str(here.folder.path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "magic"), "--policy: unknown policy 'magic'; installed: "),
        (("--set", "quantum_tokens=200"), "--set: policy 'tailrace'"),
        (("--policy", "pascal", "--set", "quantum_tokens=0"), "--set: policy 'pascal', parameter 'quantum"),
        (("--model", "/no/such/model"), "no folder /no/such/model"),
        (("--workers", "0"), "--workers"),
        (("--port", "99999"), "--port"),
        (("--keep-answers", "4.9"), "--keep-answers"),
        (("--report-interval", "0"), "--report-interval"),
        (("--listen", "127.0.0.1:1"), "--listen: tailrace up sets it"),
        (("--count=2",), "--count: tailrace up sets it"),
        (("--http", "127.0.0.1:1"), "--http: tailrace up sets it"),
        (("a/model", "another"), "'another' is not a flag of vllm serve"),
        (("a/model", "--model", "b/model"), "two models are given: a/model and --model b/model"),
        (("--headless",), "--headless: workers serve no HTTP as it is"),
        (("-dp", "2"), "--data-parallel-size: replicas are workers (--workers N)"),
        (("--config", "/no/such.yaml"), "--config /no/such.yaml: "),
        (("--front", "rust", "--host", "0.0.0.0"), "0.0.0.0:8000 can be reached from other machines"),
        (("a/b/c",), "no folder a/b/c"),
    ],
)
def test_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("TAILRACE_RUN_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["up", "--engine", "simulated", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert RunFolder(tmp_path).read() is None


def test_a_part_that_fails_while_starting(here: WorkingFolder) -> None:
    """With a model of unknown kind the front end fails, and everything else is stopped."""
    empty = here.path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    (empty / "tokenizer.json").write_text("{}")
    result = here.up("--workers", "1", "--model", str(empty))
    assert result.returncode == 1
    assert re.search(r"(worker-0|frontend) exited while starting \(exit code \d+\)", result.stderr)
    assert "the last lines of" in result.stderr
    assert "All started processes were stopped." in result.stderr
    assert here.folder.read() is None


def test_a_worker_killed_while_starting(here: WorkingFolder) -> None:
    def kill_worker(state: RunState, running: subprocess.Popen[str]) -> None:
        worker = next(part for part in state.parts if part.name == "worker-0")
        os.kill(worker.identity.pid, signal.SIGKILL)

    state, code, errors = _disturbed_start(here, kill_worker)
    assert code == 1
    assert "worker-0 exited while starting (SIGKILL; out of memory?)" in errors
    _assert_nothing_left(here, state)


def test_an_interrupted_start(here: WorkingFolder) -> None:
    state, code, errors = _disturbed_start(here, lambda _, running: running.send_signal(signal.SIGINT))
    assert code == 130
    assert "interrupted" in errors
    _assert_nothing_left(here, state)


def _disturbed_start(
    here: WorkingFolder, disturb: Callable[[RunState, subprocess.Popen[str]], None]
) -> tuple[RunState, int, str]:
    """Run `tailrace up` and disturb it once the worker has been started; return the state then, the exit code
    and what it printed.

    Again if it is up before that, as this process did not run for a while.
    """
    for _ in range(TRIES):
        running = subprocess.Popen(
            here.command("up", "--engine", "simulated", "--front", FAST_FRONT, "--port", str(here.port)),
            cwd=here.path,
            env=here.environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        state = _wait_for_worker_start(here)
        disturb(state, running)
        _, errors = running.communicate(timeout=WAIT_S)
        if running.returncode:
            break
        assert here.tailrace("down").returncode == 0
    return state, running.returncode, errors


def _wait_for_worker_start(here: WorkingFolder) -> RunState:
    def starts() -> bool:
        state = here.folder.read()
        return state is not None and any(part.name == "worker-0" for part in state.parts)

    _wait(starts, "worker-0 to be started")
    return here.state()


def _assert_nothing_left(here: WorkingFolder, state: RunState) -> None:
    assert here.folder.read() is None
    assert not any(part.identity.session_members() for part in state.parts)
