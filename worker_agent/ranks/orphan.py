"""Ends a rank whose worker is gone before the rank serves.

vLLM's ranks watch their parent only once the model is loaded. Until then one that is left alone goes on: it
waits in the rendezvous for ranks that nobody starts any more, half an hour by default, or loads a model and
holds the memory of its device meanwhile. Afterwards the rank's agent sees to it (agent.py), which has things
to put away first.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection
from typing import Final

WORKER_PID: Final = "TAILRACE_WORKER_PID"
"""The environment variable by which ranks know the process of their worker."""


class OrphanWatch:
    """Ends this process, if it is a rank, with status 1 when its worker is gone, until told to stop.

    By the interpreter's own record of its parent (`multiprocessing.parent_process`): the kernel's
    PR_SET_PDEATHSIG fires when the spawning *thread* ends, too.
    """

    def __init__(self) -> None:
        self._stopped = False
        parent = multiprocessing.parent_process()
        if parent is not None and os.environ.get(WORKER_PID, str(os.getpid())) != str(os.getpid()):
            threading.Thread(
                target=self._watch, args=(parent.sentinel,), name="tailrace-orphan", daemon=True
            ).start()

    def stop(self) -> None:
        """Somebody else notices from now on."""
        self._stopped = True

    def _watch(self, sentinel: int) -> None:
        connection.wait([sentinel])
        if not self._stopped:
            # The main thread waits in native code, where no exception would reach it.
            os._exit(1)
