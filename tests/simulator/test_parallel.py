"""Tasks in several processes: results, order, failures and interrupts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from simulator.parallel import Task, TaskError, TaskProgress, run_tasks
from tests.waiting import WAIT_S


def _square(number: int) -> int:
    return number * number


def _refuse(number: int) -> int:
    raise ValueError(f"{number} is not for me")


def _die(code: int) -> int:
    os._exit(code)


def _unsendable(number: int) -> object:
    return lambda: number


def _squares(costs: list[float]) -> list[Task[int]]:
    return [Task(f"t{n}", _square, (n,), cost) for n, cost in enumerate(costs)]


def test_results_in_the_order_of_the_tasks() -> None:
    assert list(run_tasks(_squares([1.0, 3.0, 2.0]), processes=2).items()) == [
        ("t0", 0),
        ("t1", 1),
        ("t2", 4),
    ]


def test_the_longest_task_runs_first_and_progress_is_by_cost() -> None:
    reported: list[TaskProgress] = []
    run_tasks(_squares([1.0, 5.0, 2.0, 2.0]), processes=1, progress=reported.append)
    assert [progress.name for progress in reported] == ["t1", "t2", "t3", "t0"]
    assert [progress.share for progress in reported] == pytest.approx([0.5, 0.7, 0.9, 1.0])
    assert [(progress.done, progress.total) for progress in reported] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_no_tasks_give_no_results() -> None:
    assert run_tasks([]) == {}


def test_task_names_must_be_distinct() -> None:
    with pytest.raises(ValueError, match="distinct"):
        run_tasks([Task("a", _square, (1,)), Task("a", _square, (2,))])


def children() -> set[int | None]:
    """Return the PIDs of child processes, including those of other tests."""
    return {child.pid for child in multiprocessing.active_children()}


def test_a_failure_names_its_task_and_stops_the_workers() -> None:
    before = children()
    tasks = [Task("good", _square, (1,), 2.0), Task("bad", _refuse, (7,), 1.0)]
    with pytest.raises(TaskError, match=r"^bad: ValueError: 7 is not for me$") as raised:
        run_tasks(tasks, processes=1)
    assert raised.value.name == "bad"
    assert "_refuse" in raised.value.details
    assert children() == before


def test_failures_that_the_caller_takes_cost_no_other_task() -> None:
    before = children()
    failed: list[str] = []
    succeeded: list[tuple[str, int]] = []
    tasks = [
        Task("bad", _refuse, (7,), 3.0),
        Task("fatal", _die, (3,), 2.0),
        Task("good", _square, (2,), 1.0),
    ]
    found = run_tasks(
        tasks,
        processes=1,
        succeeded=lambda name, result: succeeded.append((name, result)),
        failed=lambda error: failed.append(str(error)),
    )
    assert found == {"good": 4}
    assert succeeded == [("good", 4)]
    assert failed == ["bad: ValueError: 7 is not for me", "fatal: its process ended with code 3"]
    assert children() == before


def test_a_process_that_dies_names_its_task() -> None:
    with pytest.raises(TaskError, match=r"^fatal: its process ended with code 3$"):
        run_tasks([Task("fatal", _die, (3,))])


def test_a_result_that_cannot_be_pickled_names_its_task() -> None:
    with pytest.raises(TaskError, match=r"^odd: what it returned cannot be sent"):
        run_tasks([Task("odd", _unsendable, (3,))])


def test_an_interrupt_stops_the_workers() -> None:
    before = children()

    def interrupt(_: TaskProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(_squares([1.0] * 8), processes=1, progress=interrupt)
    assert children() == before


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_is_deferred_until_workers_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    started = multiprocessing.get_context("spawn").Process.start
    calls: list[int] = []

    def interrupted(process: BaseProcess) -> None:
        signal.raise_signal(signal.SIGINT)
        started(process)
        calls.append(1)

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(_squares([1.0] * 4), processes=2)
    assert calls == [1, 1]
    assert children() == before


def _work_for_ever() -> int:
    # In one piece: the other worker writes to the same pipe.
    os.write(1, b"working\n")
    while True:
        sum(range(1_000))


_RUN = """
from simulator.parallel import Task, run_tasks
from tests.simulator.test_parallel import _work_for_ever

if __name__ == "__main__":
    run_tasks([Task(name, _work_for_ever) for name in "ab"], processes=2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_run_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    root = Path(__file__).parents[2]
    run = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in "ab"] == [b"working\n"] * 2
    run.send_signal(number)
    # The output ends once no process can write to it any more.
    run.communicate(timeout=WAIT_S)
    assert run.returncode == -number
