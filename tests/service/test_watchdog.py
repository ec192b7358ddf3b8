"""A service whose event loop stands still ends, with the stacks that say where."""

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


def test_a_hung_service_ends_and_says_where_it_hung() -> None:
    done = _run("hang", "0.3")
    assert done.returncode == 1
    assert "stuck" in done.stderr


@pytest.mark.parametrize("timeout", ["0.3", "0"])
def test_one_that_turns_its_loop_is_left_alone(timeout: str) -> None:
    done = _run("turn", timeout)
    assert (done.returncode, done.stdout) == (0, "ended by itself\n"), done.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_timeout_that_cannot_be_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ValueError, match=f"{TIMEOUT}: '{text}'"):
        watchdog_timeout_s()
