"""End a rank whose worker dies before the rank serves.

vLLM's ranks watch their parent only once the model is loaded. Until then an orphaned rank goes on: it waits
in the rendezvous for ranks that nobody will start, half an hour by default, or loads a model and holds device
memory meanwhile. Once the model is loaded the rank's agent (rank_agent.py) takes over, as it has to clean up
first.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection
from typing import Final

from worker_agent.parallel.rank_leftovers import names_of, remove

WORKER_PID: Final = "TAILRACE_WORKER_PID"
"""Environment variable that holds the process id of the ranks' worker."""


class OrphanWatch:
    """End this process with status 1 when its worker dies, if it is a rank, until `stop`.

    It follows the interpreter's own record of its parent (`multiprocessing.parent_process`), because the
    kernel's PR_SET_PDEATHSIG also fires when the spawning *thread* ends.
    """

    def __init__(self) -> None:
        self._stopped = False
        parent = multiprocessing.parent_process()
        if parent is not None and os.environ.get(WORKER_PID, str(os.getpid())) != str(os.getpid()):
            threading.Thread(
                target=self._watch, args=(parent.sentinel,), name="tailrace-orphan", daemon=True
            ).start()

    def stop(self) -> None:
        """Stop watching: from now on the rank's agent does."""
        self._stopped = True

    def _watch(self, sentinel: int) -> None:
        connection.wait([sentinel])
        if not self._stopped:
            remove(names_of([os.getpid()]))
            # The main thread waits in native code, which an exception would not interrupt.
            os._exit(1)
