"""A service whose event loop hangs exits with the stacks of its threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tailrace.service.watchdog import TIMEOUT, waited_for_core_s, watchdog_timeout_s
from tests.waiting import WAIT_S

_SERVICE = """
import asyncio, ctypes, faulthandler, os, signal, sys, time
from tailrace.service.runtime import run_service

def stuck():
    time.sleep(120)

async def main(shutdown):
    if sys.argv[1] == "hang":
        stuck()
    if sys.argv[1] == "hang with the lock":
        ctypes.PyDLL(None).sleep(120)
    print("runs", flush=True)
    if sys.argv[1] == "stop":
        # The loop is blocked at the watchdog's second look before the process stops, until after it goes on.
        time.sleep(0.9)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
    else:
        await asyncio.sleep(1.0)
    print("ended by itself")

if sys.argv[1] == "turn":
    # The C timer counts the time in which a busy machine does not run the process.
    faulthandler.dump_traceback_later = lambda *_, **__: None
run_service(main)
"""


def _run(mode: str, timeout: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SERVICE, mode]
    return subprocess.run(
        command,
        env={TIMEOUT: timeout, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_a_hung_service_exits_with_its_stack() -> None:
    result = _run("hang", "0.3")
    assert result.returncode == 1
    assert "stuck" in result.stderr


def test_a_call_that_keeps_the_interpreter_lock_is_found() -> None:
    result = _run("hang with the lock", "0.3")
    assert result.returncode == 1
    assert "in main" in result.stderr


def test_a_suspended_process_is_not_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVICE, "stop"],
        env={TIMEOUT: "4", "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            # Longer than the loop may be blocked.
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "ended by itself\n"), err


# Shorter than it runs.
@pytest.mark.parametrize("timeout", ["0.9", "0"])
def test_a_running_service_is_not_ended(timeout: str) -> None:
    result = _run("turn", timeout)
    assert (result.returncode, result.stdout) == (0, "runs\nended by itself\n"), result.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_invalid_timeout_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ValueError, match=f"{TIMEOUT}: '{text}'"):
        watchdog_timeout_s()


_CALLING = """
import asyncio, os, sys, time
from tailrace.service import watchdog
from tailrace.service.runtime import run_service

calls = []

def on_hung(call, seconds):
    print(f"{call} hung", flush=True)
    os.environ["RUN"] = "second"
    watchdog.restart_process()

async def main(shutdown):
    print(os.getpid(), os.environ.get("RUN", "first"), flush=True)
    current = lambda: calls[-1] if calls else None
    with watchdog.watched_calls(current, lambda call: print(call, "late", flush=True), on_hung, 1.5):
        for number in range(3):
            calls.append(f"short {number}")
            await asyncio.sleep(0)
            calls.pop()
        if os.environ.get("RUN") == "second":
            return
        calls.append("endless")
        while True:
            pass

run_service(main)
"""


def test_a_call_that_hangs_restarts_the_process_in_its_place() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _CALLING],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, result.stderr
    first, *events, second = result.stdout.splitlines()
    assert first.split() == [second.split()[0], "first"] and second.endswith("second")
    assert events[0] == "endless late" and events[-1] == "endless hung"


def test_the_wait_for_a_core_is_known() -> None:
    # Of this thread, and of one that there is not.
    assert waited_for_core_s() >= 0.0
    assert waited_for_core_s(2**22) == 0.0
