"""The worker's view of an engine's ranks, which run in their own processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Final

from worker_agent.engine.vllm.core import EngineParts
from worker_agent.parallel.rank_leftovers import Record, names_of, remove, remove_meeting
from worker_agent.parallel.rank_links import RankLinks

_log = logging.getLogger(__name__)

# Deadline for a killed process to end.
_JOIN_S: Final = 5.0


class EngineRanks:
    """RankedMemory of a vLLM engine: its ranks on this machine. Event loop only.

    When one rank dies, the others are killed: vLLM's own watch would first wait for the ranks that wait for
    it.
    """

    def __init__(self, parts: EngineParts, died: Callable[[str], None], record: Record) -> None:
        """`died` is called once, when a rank exits or hangs without having been stopped.

        `record` gets the names of what the ranks share.
        """
        self._parts = parts
        self._died = died
        ranks = parts.core.local_ranks
        self._processes = frozenset(rank.process for rank in ranks)
        self._links = RankLinks(len(ranks), self._lost)
        self._record = record
        # Read now: of a rank that is gone they cannot be read.
        self._shared = names_of([os.getpid(), *self._processes])
        record.write(self._shared)

    @property
    def links(self) -> RankLinks:
        """RankedMemory.links."""
        return self._links

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        """RankedMemory.exported."""
        return self._parts.read(request_id).block_ids(first_block, num_blocks)

    def receiving(
        self, request_id: str, first_block: int, num_blocks: int
    ) -> AbstractContextManager[Sequence[int]]:
        """RankedMemory.receiving."""
        return self._parts.written(request_id).receiving(first_block, num_blocks)

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for child in self._running():
            _log.warning("killing a rank: process %d", child.pid)
            child.kill()

    def clear(self) -> None:
        """Kill the ranks that still run and remove what killed ranks leave behind: their rendezvous file and
        their shared memory. Blocks for up to 5 s per rank."""
        self.kill()
        for child in self._running():
            child.join(_JOIN_S)
        remove(self._shared)
        remove_meeting(self._parts.core.ranks[0].meeting)
        self._record.clear()

    def _running(self) -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child.pid in self._processes]

    def _lost(self, rank: int, what: str) -> None:
        ranks = self._parts.core.ranks
        self._died(f"rank {rank} of {len(ranks)} (process {ranks[rank].process}) {what}")
        self.kill()
