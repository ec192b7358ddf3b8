"""What a test run started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

# Plays a test run: starts a process that no signal to the run reaches, in the environment in which tests
# start a local cluster, says which, and hangs.
RUN = """
import pathlib, subprocess, time
from tests.harness.working_folder import WorkingFolder
from tests.leftovers import end_with_this_process
end_with_this_process()
environment = WorkingFolder(pathlib.Path()).environment()
print(subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True).pid, flush=True)
time.sleep(1000)
"""


def start(
    command: list[str], stderr: int | None = None, **environment: str
) -> tuple[subprocess.Popen[str], int]:
    """Start a run; return it and the process that it started."""
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert run.stdout is not None
    return run, int(run.stdout.readline())


def running(pid: int) -> bool:
    """Return whether the process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_leaves_nothing(number: signal.Signals) -> None:
    run, started = start([sys.executable, "-c", RUN])
    run.send_signal(number)
    run.wait(WAIT_S)
    wait_until(lambda: not running(started), "what the run started to end")


def test_a_run_ends_with_its_make() -> None:
    shell = ["sh", "-c", f"{sys.executable} -c '{RUN}'; true"]
    make, started = start(shell, MAKELEVEL="1")
    make.kill()
    make.wait(WAIT_S)
    wait_until(lambda: not running(started), "what the run started to end")


def test_a_run_whose_reader_is_gone_leaves_nothing() -> None:
    run, started = start([sys.executable, "-c", RUN], stderr=subprocess.PIPE)
    assert run.stderr is not None
    run.stderr.close()
    run.kill()
    run.wait(WAIT_S)
    wait_until(lambda: not running(started), "what the run started to end")
