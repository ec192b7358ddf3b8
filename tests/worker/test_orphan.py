"""A rank whose worker is killed while the engine starts."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import connection

import pytest

from tests.waiting import WAIT_S
from worker_agent.parallel.rank_leftovers import WORKER_PID, OrphanWatch


def rank(pipe: connection.Connection) -> None:
    """Send the process ID, then wait as in a rendezvous, for longer than the test does."""
    OrphanWatch()
    pipe.send(os.getpid())
    threading.Event().wait(2 * WAIT_S)


def worker() -> None:
    """Start a rank, print its process ID, and wait to be killed."""
    os.environ[WORKER_PID] = str(os.getpid())
    receiver, sender = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    # Started from a thread that ends, which must not end the rank.
    starter = threading.Thread(target=context.Process(target=rank, args=(sender,)).start)
    starter.start()
    starter.join()
    print(receiver.recv(), flush=True)
    threading.Event().wait(WAIT_S)


def test_rank_ends_with_its_worker() -> None:
    script = "from tests.worker.test_orphan import worker; worker()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        handle = os.pidfd_open(int(process.stdout.readline()))
        try:
            assert not connection.wait([handle], 0)
            process.kill()
            assert connection.wait([handle], WAIT_S)
        finally:
            os.close(handle)


def test_stopped_watch_does_not_end_the_process() -> None:
    watch = OrphanWatch()
    watch.stop()
    sentinel, worker_end = multiprocessing.Pipe()
    worker_end.close()
    # A faulty implementation would end this process.
    watch._watch(sentinel.fileno())
    sentinel.close()


def test_only_ranks_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    OrphanWatch()
    # In the worker itself.
    monkeypatch.setenv(WORKER_PID, str(os.getpid()))
    OrphanWatch()
    assert threading.active_count() == before
