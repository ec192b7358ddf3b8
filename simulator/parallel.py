"""Run independent tasks in several processes, the longest first.

Each worker is a fresh interpreter, so a task depends on its arguments only; arguments and results are
pickled. If a task fails or a worker dies, the run ends with the task's name, unless the caller takes its
failures. On an interrupt, or if a callback raises, all workers are terminated before the exception
propagates. If this process is killed, they end at once, in the middle of their tasks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Time after which a worker that does not terminate is killed.
_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """A call of `work(*arguments)` in some process; everything in it must be picklable."""

    # Distinct among the tasks of a run.
    name: str
    work: Callable[..., T]
    arguments: tuple[object, ...] = ()
    # Expected seconds, or any value proportional to them.
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Progress after the end of a task."""

    name: str
    done: int
    total: int
    # Share of the total cost that is done.
    share: float


class TaskError(Exception):
    """A failed task: its name, and its traceback in `details` ("" if its process died)."""

    def __init__(self, name: str, message: str, details: str = "") -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.details = details


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    details: str


@dataclass(frozen=True, slots=True)
class _Success(Generic[T]):
    value: T


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(
    tasks: Sequence[Task[T]],
    *,
    processes: int | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
    succeeded: Callable[[str, T], None] | None = None,
    failed: Callable[[TaskError], None] | None = None,
) -> dict[str, T]:
    """Run tasks and return their results by name, in the order of `tasks`.

    Use at most `processes` processes; None: one per core. `succeeded` is called with each result as it is
    made, `failed` with each failure: the other tasks go on, and the failed one has no result. Without
    `failed`, raise TaskError for the first one. Raise ValueError for names that are not distinct.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise ValueError("the names of tasks must be distinct")
    count = max(1, min(available_cores() if processes is None else processes, len(tasks)))
    run = _Run(tasks, progress, succeeded, failed)
    workers: list[_Worker[T]] = []
    try:
        with _interrupts_held():
            for _ in range(count if tasks else 0):
                worker: _Worker[T] = _Worker()
                workers.append(worker)
        for worker in workers:
            run.assign(worker)
        while run.unfinished:
            ready = wait([worker.link for worker in workers if worker.task is not None])
            for at, worker in enumerate(workers):
                if worker.link in ready:
                    run.collect(worker)
                    if worker.dead:
                        worker.end()
                        with _interrupts_held():
                            workers[at] = _Worker()
                    run.assign(workers[at])
    finally:
        for worker in workers:
            worker.end()
    return {task.name: run.results[task.name] for task in tasks if task.name in run.results}


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defer interrupts until the end of the block, and keep them from processes started in it.

    Ctrl-C goes to the whole process group, but the parent terminates its workers. A worker interrupted while
    its interpreter starts, or left half started, would write a traceback to the terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python raises interrupts only in the main thread.
        yield
        return
    # Starting it unblocks the signal, so it must come first.
    resource_tracker.ensure_running()
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    # Child processes inherit the mask for good. Other threads of this process still receive the signal, hence
    # the handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, previous)
        if received:
            signal.raise_signal(signal.SIGINT)


class _Worker(Generic[T]):
    """A process and the connection to it; `task` is its current task."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.task: Task[T] | None = None
        self.dead = False
        self.link, child_end = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(child_end,), daemon=True)
        self._process.start()
        # Only the child may hold its end open, or closing it would go unnoticed here.
        child_end.close()

    def result(self) -> _Success[T] | _Failure:
        """Return the result of its task; a process that died has failed."""
        try:
            result: _Success[T] | _Failure = self.link.recv()
        except EOFError:
            self._process.join(_GRACE_S)
            self.dead = True
            return _Failure(f"its process ended with code {self._process.exitcode}", "")
        return result

    def end(self) -> None:
        """Terminate it at once, whatever it is doing. Can be called again."""
        if self.link.closed:
            return
        self.link.close()
        self._process.terminate()
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class _Run(Generic[T]):
    """Tasks to assign, longest first, and the results so far."""

    def __init__(
        self,
        tasks: Sequence[Task[T]],
        progress: Callable[[TaskProgress], None] | None,
        succeeded: Callable[[str, T], None] | None,
        failed: Callable[[TaskError], None] | None,
    ) -> None:
        # Sorted with the longest last, since tasks are taken from the end; of equals, the first given first.
        self._waiting = sorted(reversed(tasks), key=lambda task: task.cost)
        self._progress = progress
        self._succeeded = succeeded
        self._failed = failed
        self._done = 0
        self._total = len(tasks)
        self._cost = sum(task.cost for task in tasks)
        self._cost_done = 0.0
        self.results: dict[str, T] = {}

    @property
    def unfinished(self) -> bool:
        return self._done < self._total

    def assign(self, worker: _Worker[T]) -> None:
        """Assign the next task, if there is one."""
        worker.task = self._waiting.pop() if self._waiting else None
        if worker.task is not None:
            # A dead worker is noticed when its result is taken.
            with suppress(BrokenPipeError):
                worker.link.send((worker.task.work, worker.task.arguments))

    def collect(self, worker: _Worker[T]) -> None:
        """Take the result of its task. Raise TaskError unless the caller takes failures."""
        task = worker.task
        assert task is not None
        match worker.result():
            case _Failure(message, details):
                error = TaskError(task.name, message, details)
                if self._failed is None:
                    raise error
                self._failed(error)
            case _Success(value):
                self.results[task.name] = value
                if self._succeeded is not None:
                    self._succeeded(task.name, value)
        self._done += 1
        self._cost_done += task.cost
        if self._progress is not None:
            share = self._cost_done / self._cost if self._cost > 0.0 else 1.0
            self._progress(TaskProgress(task.name, self._done, self._total, share))


def _work(link: Connection) -> None:
    """Run tasks in a worker until the other end of the connection is closed."""
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    while True:
        try:
            work, arguments = link.recv()
        except EOFError:
            return
        result = _attempt(work, arguments)
        try:
            link.send(result)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            link.send(_Failure(f"what it returned cannot be sent: {error}", ""))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # An exception here would end this thread alone.
    os._exit(1)


def _attempt(work: Callable[..., T], arguments: tuple[object, ...]) -> _Success[T] | _Failure:
    try:
        return _Success(work(*arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the task and is raised by the parent
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
