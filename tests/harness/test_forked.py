"""A stand-in for a forked process is like the process itself, to whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.forked import ForkServer
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

# Ends only with a signal, and tells which process it is.
_WAITING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["decimal"])
    yield server
    server.end()


def run(server: ForkServer, *arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run it as `python` with these arguments."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [server.python(), *arguments], capture_output=True, text=True, timeout=WAIT_S, **kwargs
    )


def test_streams_arguments_folder_environment_and_exit_code(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import atexit, os, sys; atexit.register(print, 'the end')\n"
        "print(__name__, sys.argv, 'decimal' in sys.modules, os.getcwd(), os.environ.get('OURS'))\n"
        "print(sys.stdin.read(), file=sys.stderr); sys.exit(7)"
    )
    ended = run(server, "-u", "-c", code, "x", input="read", cwd=tmp_path, env={"OURS": "1"})
    assert ended.returncode == 7
    assert ended.stdout == f"__main__ ['-c', 'x'] True {tmp_path} 1\nthe end\n"
    assert ended.stderr == "read\n"


def test_modules_errors_and_other_arguments(server: ForkServer) -> None:
    assert run(server, "-m", "calendar", "2026", "1").stdout.split()[:2] == ["January", "2026"]
    assert "ZeroDivisionError" in (failed := run(server, "-c", "1/0")).stderr and failed.returncode == 1
    assert "left in a hurry" in (left := run(server, "-c", "exit('left in a hurry')")).stderr
    assert left.returncode == 1
    # Just Python, which has not imported it.
    assert run(server, "-I", "-c", "import sys; print('decimal' in sys.modules)").stdout == "False\n"


def test_file_descriptors_have_their_numbers_and_are_closed_with_the_process(server: ForkServer) -> None:
    read, write = os.pipe()
    try:
        run(server, "-c", f"import os; os.write({write}, b'through')", pass_fds=[write])
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as reading:
        assert reading.read() == b"through"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_ends_both(server: ForkServer, number: signal.Signals) -> None:
    with subprocess.Popen([server.python(), "-c", _WAITING], stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        pid = int(stand_in.stdout.readline())
        assert pid != stand_in.pid
        stand_in.send_signal(number)
        assert stand_in.wait(WAIT_S) == -number
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the forked process to be gone")


def test_a_forked_process_that_is_killed_ends_its_stand_in(server: ForkServer) -> None:
    ended = run(server, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL


def test_nothing_is_left_of_a_server_and_it_starts_again() -> None:
    other = ForkServer([])
    for _ in range(2):
        assert run(other, "-c", "print(1)").stdout == "1\n"
        folder = Path(other.python()).parent
        other.end()
        assert not folder.exists()
