"""A rank whose worker is killed while the engine starts."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import connection

import pytest

from worker_agent.ranks.orphan import WORKER_PID, OrphanWatch


def rank(pipe: connection.Connection) -> None:
    """Say that it is there, then wait for others as if in a rendezvous, for a minute at most."""
    OrphanWatch()
    pipe.send(os.getpid())
    threading.Event().wait(60)


def worker() -> None:
    """Start a rank, say its process, and wait to be killed."""
    os.environ[WORKER_PID] = str(os.getpid())
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    # From a thread that ends: the rank is none the wiser.
    starter = threading.Thread(target=context.Process(target=rank, args=(there,)).start)
    starter.start()
    starter.join()
    print(here.recv(), flush=True)
    threading.Event().wait(60)


def test_it_ends_with_its_worker() -> None:
    script = "from tests.worker.test_orphan import worker; worker()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        handle = os.pidfd_open(int(process.stdout.readline()))
        try:
            assert not connection.wait([handle], 0)
            process.kill()
            assert connection.wait([handle], 30)
        finally:
            os.close(handle)


def test_it_goes_on_once_somebody_else_watches() -> None:
    watch = OrphanWatch()
    watch.stop()
    sentinel, worker_end = multiprocessing.Pipe()
    worker_end.close()
    # Ends this process if it is wrong.
    watch._watch(sentinel.fileno())
    sentinel.close()


def test_only_ranks_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    OrphanWatch()
    # A worker itself.
    monkeypatch.setenv(WORKER_PID, str(os.getpid()))
    OrphanWatch()
    assert threading.active_count() == before
