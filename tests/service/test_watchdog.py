"""A service whose event loop hangs exits with the stacks of its threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.service.watchdog import TIMEOUT, watchdog_timeout_s

_SERVICE = """
import asyncio, sys, time
from tailrace.service.runtime import run_service

def stuck():
    time.sleep(120)

async def main(shutdown):
    if sys.argv[1] == "hang":
        stuck()
    await asyncio.sleep(1.0)
    print("ended by itself")

run_service(main)
"""


def _run(mode: str, timeout: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SERVICE, mode]
    return subprocess.run(
        command,
        env={TIMEOUT: timeout, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hung_service_exits_with_its_stack() -> None:
    result = _run("hang", "0.3")
    assert result.returncode == 1
    assert "stuck" in result.stderr


@pytest.mark.parametrize("timeout", ["0.3", "0"])
def test_a_running_service_is_not_ended(timeout: str) -> None:
    result = _run("turn", timeout)
    assert (result.returncode, result.stdout) == (0, "ended by itself\n"), result.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_invalid_timeout_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ValueError, match=f"{TIMEOUT}: '{text}'"):
        watchdog_timeout_s()
