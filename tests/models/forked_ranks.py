"""Fork ranks from a cell's process, which has imported everything that they need.

vLLM spawns each rank, and each imports vLLM: at least ten seconds of CPU, for four ranks per cell. The fork
server of `multiprocessing` would be a new interpreter that imports it again. Here the server itself is
forked, while the cell's process has no other threads, whose locks would be held forever in a child.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from socket import AF_UNIX, socket
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NoReturn

from worker_agent.engine.vllm.settings import prepare_ranks

# vLLM spins for a second before a waiting process sleeps. Six processes of two engines would spend most of
# two cores spinning.
_SPINS_S = 0.0005


@contextmanager
def forked_ranks(tensor: int, stages: int) -> Iterator[None]:
    """Fork the ranks of each engine that this process loads in the block. Enter it before there are
    threads."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    # Ranks inherit from the server, so prepare before starting it.
    prepare_ranks({"tensor_parallel_size": tensor, "pipeline_parallel_size": stages})
    spin = shm_broadcast.SpinCondition.__init__
    *others, _ = spin.__defaults__
    spin.__defaults__ = (*others, _SPINS_S)
    context = multiprocessing.get_context("forkserver")
    multiproc_executor.get_mp_context = lambda: context
    with TemporaryDirectory(prefix="tailrace-ranks-") as folder:
        server = _ForkedServer(f"{folder}/server")
        server.ensure_running()
        forkserver._forkserver = server
        forkserver.connect_to_new_process = server.connect_to_new_process
        yield


class _ForkedServer(forkserver.ForkServer):
    # Attributes of Python 3.11 to 3.13.
    _lock: Lock
    _forkserver_address: str | None
    _forkserver_alive_fd: int | None
    _forkserver_pid: int | None

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def ensure_running(self) -> None:
        """Start the server unless it runs, as ForkServer.ensure_running does, but by forking."""
        with self._lock:
            resource_tracker.ensure_running()
            if self._forkserver_pid is not None:
                return
            with socket(AF_UNIX) as listener:
                listener.bind(self._address)
                listener.listen()
                # The server exits when no process holds the other end.
                alive_r, alive_w = os.pipe()
                child = os.fork()
                if child == 0:
                    os.close(alive_w)
                    _serve(listener.detach(), alive_r)
                os.close(alive_r)
            self._forkserver_address = self._address
            self._forkserver_alive_fd = alive_w
            self._forkserver_pid = child


def _serve(listener: int, alive: int) -> NoReturn:
    try:
        forkserver.main(listener, alive, [])
    except SystemExit:
        os._exit(0)
    except Exception:
        logging.exception("the fork server of ranks has failed")
    finally:
        os._exit(1)
