"""Copy blocks from host memory to the device without blocking engine steps. Worker side of the connector."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from worker_agent.engine.vllm.host_pool import HostPool
from worker_agent.engine.vllm.swaps import Load


class HostLoads:
    """Runs one load at a time on its own thread. Methods are called on the engine thread only."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-from-host")
        # By request; the result lists the corrupt blocks.
        self._running: dict[str, Future[list[int]]] = {}

    def start(self, load: Load) -> None:
        """Queue a load; until it completes, the request must keep its blocks."""
        swap = load.swap
        self._running[load.request_id] = self._executor.submit(
            self._pool.load, swap.slots, swap.block_ids, swap.names
        )

    def pop_completed(self) -> dict[str, list[int]]:
        """Return the requests whose loads have completed since the last call, with their corrupt blocks."""
        done = {name: running.result() for name, running in self._running.items() if running.done()}
        for name in done:
            del self._running[name]
        return done

    def close(self) -> None:
        """Wait for the current load and cancel those that have not begun."""
        self._executor.shutdown(wait=True, cancel_futures=True)
