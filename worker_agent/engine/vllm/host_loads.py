"""Blocks on their way from host memory to the device, beside the engine's steps. The worker's side."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from worker_agent.engine.vllm.host_pool import HostPool
from worker_agent.engine.vllm.swaps import Load


class HostLoads:
    """One at a time, in a thread of its own. Engine thread only."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-from-host")
        # By request; the blocks that are not what they ought to be.
        self._running: dict[str, Future[list[int]]] = {}

    def start(self, load: Load) -> None:
        """Begin to copy; the blocks are the request's until it has ended."""
        swap = load.swap
        self._running[load.request_id] = self._executor.submit(
            self._pool.load, swap.slots, swap.block_ids, swap.names
        )

    def ended(self) -> dict[str, list[int]]:
        """The bad blocks of each request whose blocks have come since this was asked last."""
        done = {name: running.result() for name, running in self._running.items() if running.done()}
        for name in done:
            del self._running[name]
        return done

    def close(self) -> None:
        """Wait for the one under way; the others are not begun."""
        self._executor.shutdown(wait=True, cancel_futures=True)
