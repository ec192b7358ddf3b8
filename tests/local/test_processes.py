"""`tailrace down` ends exactly the started processes and their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.local.plan import PartSpec, Tier
from tailrace.local.process import stop_parts
from tailrace.local.state import (
    Identity,
    Part,
    RunFolder,
    RunFolderBusy,
    RunFolderUnusable,
    RunState,
    find_state,
    identify,
)
from tests.full_disk import files_end_at
from tests.waiting import WAIT_S

_STUBBORN = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); input()"
)
_DRAINS = """
import signal
signals = iter([lambda: print('drains', flush=True), lambda: exit(7)])
signal.signal(signal.SIGTERM, lambda *_: next(signals)())
print('up', flush=True)
while True:
    signal.pause()
"""
_WITH_CHILD = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); input()"
)

Started = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Yield a list for processes that are killed after the test."""
    processes: list[Started] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _start(started: list[Started], program: str) -> tuple[Started, str]:
    """Start a Python program in its own session; return it and its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _part(pid: int, tier: Tier = Tier.WORKER) -> Part:
    return Part(identity=identify(pid), log="", spec=PartSpec(f"{tier}-{pid}", tier, [], ""))


def _shorten_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.local.process.GRACE_S", 0.2)
    monkeypatch.setattr("tailrace.local.process.CLOSE_S", 0.2)


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and identify(pid).alive()


def test_a_zombie_is_not_alive(started: list[Started]) -> None:
    process, _ = _start(started, "print('up', flush=True); input()")
    identity = identify(process.pid)
    assert identity.alive()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}").exists()
    assert not identity.alive()


def test_another_process_with_the_same_pid_is_not_stopped(started: list[Started]) -> None:
    process, _ = _start(started, "print('up', flush=True); input()")
    mine = identify(process.pid)
    for stranger in (
        Identity(mine.pid, mine.start_ticks - 1, mine.boot_id),
        Identity(mine.pid, mine.start_ticks, "another boot"),
    ):
        part = Part(identity=stranger, log="", spec=PartSpec("x", Tier.WORKER, [], ""))
        assert stop_parts([part], lambda: None) == []
    assert mine.alive()


def test_a_part_that_ignores_sigterm_is_killed(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    _shorten_timeouts(monkeypatch)
    process, _ = _start(started, _STUBBORN)
    part = _part(process.pid)
    assert stop_parts([part], lambda: None) == [part.name]
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_a_part_that_drains_for_too_long_gets_a_second_sigterm(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.local.process.GRACE_S", 0.2)
    monkeypatch.setattr("tailrace.local.process.CLOSE_S", WAIT_S)
    process, _ = _start(started, _DRAINS)
    said: list[str] = []

    def wait_for_the_first() -> None:
        # While it still waits for the process, a second one would be lost.
        assert process.stdout is not None
        if not said:
            said.append(process.stdout.readline())

    stop_parts([_part(process.pid)], wait_for_the_first)
    assert said == ["drains\n"]
    assert process.wait(WAIT_S) == 7


def test_a_frozen_part_is_killed(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten_timeouts(monkeypatch)
    process, _ = _start(started, "print('up', flush=True); input()")
    os.kill(process.pid, signal.SIGSTOP)
    stop_parts([_part(process.pid)], lambda: None)
    assert process.wait(WAIT_S) < 0


def test_children_are_stopped_with_their_part(started: list[Started]) -> None:
    process, child = _start(started, _WITH_CHILD)
    stop_parts([_part(process.pid)], lambda: None)
    assert not _is_running(int(child))


def test_children_of_an_ended_part_are_stopped(started: list[Started]) -> None:
    process, child = _start(started, _WITH_CHILD)
    part = _part(process.pid)
    process.kill()
    process.wait(WAIT_S)
    assert _is_running(int(child))
    assert stop_parts([part], lambda: None) == [part.name]
    assert not _is_running(int(child))


def test_front_ends_stop_first_and_etcd_last(started: list[Started]) -> None:
    parts = [
        _part(_start(started, "print('up', flush=True); input()")[0].pid, tier)
        for tier in (Tier.ETCD, Tier.CONTROL, Tier.WORKER, Tier.FRONTEND)
    ]
    stopped = stop_parts(parts, lambda: None)
    assert [name.split("-")[0] for name in stopped] == ["frontend", "worker", "control", "etcd"]
    assert stop_parts(parts, lambda: None) == []


def test_state_is_found_from_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILRACE_RUN_DIR", raising=False)
    folder = RunFolder(tmp_path / ".run")
    with folder.locked():
        folder.write(RunState(admin="127.0.0.1:1", parts=[_part(os.getpid())]))
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    state = find_state()
    assert state is not None
    assert state.admin == "127.0.0.1:1"
    assert state.parts[0].identity.alive()
    folder.forget()
    assert find_state() is None


def test_a_run_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(RunFolderBusy), RunFolder(tmp_path).locked():
        pass


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"parts": 7}')
    with pytest.raises(RunFolderUnusable, match=r"state\.json is corrupt .*parts"):
        RunFolder(tmp_path).read()


def test_a_run_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (RunFolder(file), RunFolder(file / "below")):
        with pytest.raises(RunFolderUnusable, match="Not a directory"):
            folder.read()
        with pytest.raises(RunFolderUnusable, match=r"TAILRACE_RUN_DIR"), folder.locked():
            pass


def test_the_state_with_its_environment_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        folder.write(RunState(environment={"HF_TOKEN": "secret"}))
        assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


def test_a_state_that_cannot_be_written_leaves_the_previous_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(RunState(etcd="127.0.0.1:2379"))
    with (
        files_end_at(100),
        pytest.raises(RunFolderUnusable, match=f"{tmp_path}: File too large .TAILRACE_RUN_DIR"),
    ):
        folder.write(RunState(etcd="127.0.0.1:2380"))
    state = folder.read()
    assert state is not None and state.etcd == "127.0.0.1:2379"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
