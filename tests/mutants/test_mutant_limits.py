"""The limits of `make mutants`: a test run that gets no core is not taken for one that hangs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.mutants.limits import End, Limits, Progress, Usage, run_limited

_FOREVER = "while True: pass"
# Computes for as much CPU time as is given.
_COMPUTE = "import time, sys\nwhile time.process_time() < float(sys.argv[1]): pass"


def run(code: str, limits: Limits, *arguments: str, tmp_path: Path) -> End:
    return run_limited([sys.executable, "-c", code, *arguments], tmp_path, os.environ, limits).end


@given(st.lists(st.floats(0.0, 100.0), min_size=1))
def test_time_in_the_queue_for_a_core_is_not_idle(delays: list[float]) -> None:
    progress = Progress(Limits(cpu_s=10.0, idle_s=5.0), now_s=0.0)
    now_s = 0.0
    for delay_s in delays:
        now_s += delay_s
        assert progress.observe(now_s, Usage(cpu_s=0.0, queued_s=now_s)) is None


@given(st.floats(0.0, 10.0), st.floats(0.0, 1e6))
def test_only_cpu_time_counts_against_the_limit(cpu_s: float, queued_s: float) -> None:
    progress = Progress(Limits(cpu_s=10.0, idle_s=1e9), now_s=0.0)
    assert progress.observe(1e6, Usage(cpu_s, queued_s)) is None
    assert progress.observe(1e6, Usage(cpu_s + 10.1, queued_s)) is End.CPU_LIMIT


def test_a_period_without_activity_is_idle_also_after_one_with() -> None:
    progress = Progress(Limits(cpu_s=100.0, idle_s=5.0), now_s=0.0)
    assert progress.observe(5.0, Usage(cpu_s=4.0, queued_s=0.0)) is None
    assert progress.observe(9.9, Usage(cpu_s=4.0, queued_s=0.0)) is None
    assert progress.observe(10.0, Usage(cpu_s=4.1, queued_s=0.0)) is End.IDLE


def test_a_run_that_ends_by_itself(tmp_path: Path) -> None:
    code = "import sys; print('said'); sys.exit(3)"
    found = run_limited([sys.executable, "-c", code], tmp_path, os.environ, Limits(cpu_s=60.0))
    assert (found.end, found.status, found.output) == (End.EXITED, 3, "said\n")
    assert found.cpu_s > 0.0


def test_a_run_that_computes_forever(tmp_path: Path) -> None:
    assert run(_FOREVER, Limits(cpu_s=0.3), tmp_path=tmp_path) is End.CPU_LIMIT


def test_the_cpu_time_of_children_counts(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_FOREVER!r}])"
    assert run(parent, Limits(cpu_s=0.3, idle_s=60.0), tmp_path=tmp_path) is End.CPU_LIMIT


def test_a_run_that_waits_forever(tmp_path: Path) -> None:
    code = "import threading; threading.Event().wait()"
    assert run(code, Limits(cpu_s=60.0, idle_s=0.5), tmp_path=tmp_path) is End.IDLE


def test_a_run_that_hardly_gets_a_core_is_left_alone(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    busy = [subprocess.Popen([sys.executable, "-c", pinned + _FOREVER]) for _ in range(2)]
    try:
        rarely = pinned + "os.nice(5)\n" + _COMPUTE
        # The kernel counts time in the queue once it is over: longer than any wait for the core.
        assert run(rarely, Limits(cpu_s=5.0, idle_s=20.0), "0.3", tmp_path=tmp_path) is End.EXITED
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_processes_left_behind_are_ended(tmp_path: Path) -> None:
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid)"
    found = run_limited([sys.executable, "-c", child], tmp_path, os.environ, Limits(cpu_s=60.0))
    with suppress(ProcessLookupError):
        left = os.pidfd_open(int(found.output))
        try:
            # Readable once the process has ended.
            assert select.select([left], [], [], 30.0)[0]
        finally:
            os.close(left)
