"""Starting a cluster of fake parts: messages on failure, and cleanup."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.local.process import PartFailed, PartRefused, stop_parts
from tailrace.local.progress import Progress, Step
from tailrace.local.restart import Restarter
from tailrace.local.start import Settings, Starter
from tailrace.local.state import RunFolder, RunState
from tests.waiting import WAIT_S

_HANGS = (sys.executable, "-c", "input_ = __import__('threading').Event().wait()")
_NOWHERE = "127.0.0.1:9"


def _exit_with(line: str, code: int) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({line!r}); sys.exit({code})")


def _plan(*parts: PartSpec) -> Plan:
    return Plan(parts=parts, environment={}, admin=_NOWHERE, http="", etcd=_NOWHERE)


def _part(name: str, command: Sequence[str], timeout_s: float = WAIT_S) -> PartSpec:
    return PartSpec(name, Tier.ETCD, command, _NOWHERE, timeout_s=timeout_s)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / ".run")
    run.logs.mkdir(parents=True)
    return run


async def _fail(plan: Plan, folder: RunFolder) -> tuple[str, RunState]:
    """Start a plan that fails; return the message and the state with the started parts."""
    states: list[RunState] = []
    forget = folder.forget

    def forget_and_keep() -> None:
        state = folder.read()
        assert state is not None
        states.append(state)
        forget()

    folder.forget = forget_and_keep  # type: ignore[method-assign]
    with pytest.raises(PartFailed) as failure:
        await Starter(plan, folder, Progress(), cores=2).run(Settings(), "tiny")
    assert folder.read() is None
    return str(failure.value), states[0]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            "Loading\n2026-01-02 03:04:05,678 ERROR worker.main: --model: no folder /x",
            "--model: no folder /x",
        ),
        ("Usage: tailrace\nError: Invalid value for '--count': 0", "Invalid value for '--count': 0"),
    ],
)
async def test_a_final_error_line_is_the_whole_message(folder: RunFolder, log: str, shown: str) -> None:
    message, _ = await _fail(_plan(_part("worker-1", _exit_with(log, 1))), folder)
    assert message == f"worker-1 exited while starting (exit code 1): {shown} ({folder.logs}/worker-1.log)"


async def test_what_waits_for_its_turn_is_not_started_after_a_failure(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def see_nothing(_starter: Starter) -> None:
        await asyncio.Event().wait()

    # So that the part's own wait sees its end first.
    monkeypatch.setattr(Starter, "_watch", see_nothing)
    parts = [
        PartSpec(name, Tier.WORKER, _exit_with("gone", 1), _NOWHERE, heavy=True, timeout_s=WAIT_S)
        for name in ("worker-0", "worker-1", "worker-2")
    ]
    with pytest.raises(PartFailed):
        await Starter(_plan(*parts), folder, Progress(), cores=1).run(Settings(), "tiny")
    assert capsys.readouterr().err == "tailrace up: worker-0 starting\ntailrace up: worker-0 failed\n"


async def test_a_part_that_refuses_its_command_line_is_told_from_others(folder: RunFolder) -> None:
    refusing = _plan(_part("frontend", _exit_with("Error: argument --dtype: invalid choice: 'foo'", 2)))
    with pytest.raises(PartRefused, match="argument --dtype: invalid choice: 'foo'"):
        await Starter(refusing, folder, Progress(), cores=2).run(Settings(), "tiny")


async def test_other_errors_are_shown_with_the_lines_before(folder: RunFolder) -> None:
    error = "2026-01-02 03:04:05,678 ERROR frontend_svc.main: the API server exited with status 1"
    message, _ = await _fail(_plan(_part("frontend", _exit_with(f"no such parser\n{error}", 1))), folder)
    assert "  no such parser\n" in message


async def test_a_failed_part_is_reported_with_its_last_lines(folder: RunFolder) -> None:
    plan = _plan(_part("patient", _HANGS), _part("worker-1", _exit_with("no such model", 3)))
    message, state = await _fail(plan, folder)
    assert "worker-1 exited while starting (exit code 3)" in message
    assert "no such model" in message
    assert {part.name for part in state.parts} == {"patient", "worker-1"}
    assert not any(part.identity.session_members() for part in state.parts)


async def test_a_part_that_is_not_ready_in_time(folder: RunFolder) -> None:
    message, state = await _fail(_plan(_part("slow", _HANGS, timeout_s=0.3)), folder)
    assert "slow was not ready after 0 s" in message
    assert not state.parts[0].identity.session_members()


async def test_a_missing_program(folder: RunFolder) -> None:
    with pytest.raises(PartFailed, match="cannot run /no/such/etcd: No such file"):
        await Starter(_plan(_part("etcd", ["/no/such/etcd"])), folder, Progress(), 2).run(Settings(), "")


async def test_a_part_is_started_again_where_the_cluster_was_started(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command may have relative paths."""
    elsewhere = folder.path / "elsewhere"
    elsewhere.mkdir()
    state = RunState(directory=str(folder.path))
    monkeypatch.chdir(elsewhere)
    program = "import os, time; print(os.getcwd(), flush=True); time.sleep(1000)"
    process = Restarter(folder, state, Progress()).launch(_part("w", [sys.executable, "-c", program]))
    try:
        while not (lines := process.log.read_text()):
            process.check()
            await asyncio.sleep(0.01)
    finally:
        stop_parts(state.parts, process.reap)
    assert lines == f"{folder.path}\n"


class _BothStarted(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.both = asyncio.Event()
        self._names: set[str] = set()

    def show(self, name: str, step: Step) -> None:
        if step is Step.STARTING:
            self._names.add(name)
        if len(self._names) == 2:
            self.both.set()


async def test_an_interrupted_start_leaves_nothing_running(folder: RunFolder) -> None:
    progress = _BothStarted()
    plan = _plan(_part("a", _HANGS), _part("b", _HANGS))
    task = asyncio.create_task(Starter(plan, folder, progress, 2).run(Settings(), "tiny"))
    await progress.both.wait()
    state = folder.read()
    assert state is not None
    assert [part.name for part in state.parts] == ["a", "b"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(part.identity.session_members() for part in state.parts)
    assert folder.read() is None
