"""Run independent pieces of work on several processes, the longest first.

Each worker is a fresh interpreter, so that a task sees nothing but its arguments; what is sent there and back
is pickled. A task that fails, and a worker that dies, ends the whole with the task's name. On an interrupt,
or when the caller's progress callback raises, all workers are ended before the exception goes on.
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

# A worker that is told to end and does not is killed after so long.
_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """`work(*arguments)` in some process; everything in it can be pickled."""

    # Distinct among the tasks of a run.
    name: str
    work: Callable[..., T]
    arguments: tuple[object, ...] = ()
    # Expected seconds, or anything in proportion.
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A task ended."""

    name: str
    done: int
    total: int
    # Of all tasks' cost, what is done.
    share: float


class TaskError(Exception):
    """A task failed. `name` is its name, `details` the traceback in its process, "" if that died."""

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
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(
    tasks: Sequence[Task[T]],
    *,
    processes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, T]:
    """What each task returned, by name, in the order of `tasks`.

    `processes`: at most so many at a time; None: one a core. Raises TaskError for the first task that
    fails, ValueError for names that are not distinct.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise ValueError("the names of tasks must be distinct")
    count = max(1, min(available_cores() if processes is None else processes, len(tasks)))
    run = _Run(tasks, progress)
    workers: list[_Worker[T]] = []
    try:
        with _interrupts_held():
            for _ in range(count if tasks else 0):
                worker: _Worker[T] = _Worker()
                workers.append(worker)
        for worker in workers:
            run.give(worker)
        while run.unfinished:
            ready = wait([worker.link for worker in workers if worker.task is not None])
            for worker in workers:
                if worker.link in ready:
                    run.take(worker)
                    run.give(worker)
    finally:
        for worker in workers:
            worker.end()
    return {task.name: run.results[task.name] for task in tasks}


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt waits for the end of the block, and processes that are started in it never get one.

    Ctrl-C goes to the whole group, and it is the parent that ends its workers. A worker that is interrupted
    while its interpreter starts, or that is left half started, would write a traceback over the terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python raises interrupts in the main thread alone.
        yield
        return
    # Its start unblocks the signal.
    resource_tracker.ensure_running()
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    # What is blocked here is blocked for good in what is started. Other threads of this process still take
    # the signal, hence the handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, previous)
        if came:
            signal.raise_signal(signal.SIGINT)


class _Worker(Generic[T]):
    """A process and the link to it; `task` is what it works on."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.task: Task[T] | None = None
        self.link, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        # Their end must be open there alone, or its closing would go unnoticed here.
        theirs.close()

    def result(self) -> _Success[T] | _Failure:
        """What became of its task. A process that died has failed."""
        try:
            answer: _Success[T] | _Failure = self.link.recv()
        except EOFError:
            self._process.join(_GRACE_S)
            return _Failure(f"its process ended with code {self._process.exitcode}", "")
        return answer

    def end(self) -> None:
        """At once, whatever it does."""
        self.link.close()
        self._process.terminate()
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class _Run(Generic[T]):
    """Tasks to give out, longest first, and results so far."""

    def __init__(self, tasks: Sequence[Task[T]], progress: Callable[[Progress], None] | None) -> None:
        # The longest last: they are taken from the end. Of equals the first in the order given.
        self._waiting = sorted(reversed(tasks), key=lambda task: task.cost)
        self._progress = progress
        self._total = len(tasks)
        self._cost = sum(task.cost for task in tasks)
        self._cost_done = 0.0
        self.results: dict[str, T] = {}

    @property
    def unfinished(self) -> bool:
        return len(self.results) < self._total

    def give(self, worker: _Worker[T]) -> None:
        """The next task, if there is one."""
        worker.task = self._waiting.pop() if self._waiting else None
        if worker.task is not None:
            # A worker that is dead already says so when its result is taken.
            with suppress(BrokenPipeError):
                worker.link.send((worker.task.work, worker.task.arguments))

    def take(self, worker: _Worker[T]) -> None:
        """The result of its task. Raises TaskError."""
        task = worker.task
        assert task is not None
        match worker.result():
            case _Failure(message, details):
                raise TaskError(task.name, message, details)
            case _Success(value):
                self.results[task.name] = value
        self._cost_done += task.cost
        if self._progress is not None:
            share = self._cost_done / self._cost if self._cost > 0.0 else 1.0
            self._progress(Progress(task.name, len(self.results), self._total, share))


def _work(link: Connection) -> None:
    """A worker's life: until the other end is closed."""
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


def _attempt(work: Callable[..., T], arguments: tuple[object, ...]) -> _Success[T] | _Failure:
    try:
        return _Success(work(*arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the task and is raised by the parent
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
