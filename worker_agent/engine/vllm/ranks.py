"""An engine's ranks, in their own processes: as the worker sees those of its machine (`EngineRanks`), and
those of a machine that is not the worker's (`NodeRanks`).

As in `vllm serve --headless`, vLLM's executor starts the latter, and they take their orders from the worker's
engine core.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tailrace.model_identity import identify_model
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.vllm.core import EngineParts
from worker_agent.engine.vllm.settings import vllm_config
from worker_agent.parallel.node_span import NODE
from worker_agent.parallel.rank_leftovers import (
    Names,
    Record,
    meeting_file,
    names_of,
    remove,
    remove_left_behind,
    remove_meeting,
)
from worker_agent.parallel.rank_links import RankLinks
from worker_agent.settings import EngineOptions

_log = logging.getLogger(__name__)

# Deadline for a killed process to end.
_JOIN_S: Final = 5.0


class EngineRanks:
    """RankedMemory of a vLLM engine: its ranks on this machine. Event loop only.

    When one rank dies, the others are killed: vLLM's own watch would first wait for the ranks that wait for
    it.
    """

    def __init__(self, parts: EngineParts, died: Callable[[str], None]) -> None:
        """`died` is called once, when a rank exits or hangs without having been stopped."""
        self._parts = parts
        self._died = died
        ranks = parts.core.local_ranks
        self._processes = frozenset(rank.process for rank in ranks)
        self._links = RankLinks(len(ranks), self._lost)
        self._record = Record()
        # Read now: of a rank that is gone they cannot be read.
        self._shared = names_of([os.getpid(), *self._processes])
        self._record.write(self._shared | meeting_file(parts.core.ranks[0].meeting))

    @property
    def links(self) -> RankLinks:
        return self._links

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        return self._parts.read(request_id).block_ids(first_block, num_blocks)

    def receiving(
        self, request_id: str, first_block: int, num_blocks: int
    ) -> AbstractContextManager[Sequence[int]]:
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
        _clear(self._running(), self._shared, self._parts.core.ranks[0].meeting, self._record)

    def _running(self) -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child.pid in self._processes]

    def _lost(self, rank: int, what: str) -> None:
        ranks = self._parts.core.ranks
        self._died(f"rank {rank} of {len(ranks)} (process {ranks[rank].process}) {what}")
        self.kill()


def _clear(ranks: Sequence[BaseProcess], shared: Names, meeting: str, record: Record) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(_JOIN_S)
    remove(shared)
    remove_meeting(meeting)
    record.clear()


def encode_options(options: EngineOptions) -> bytes:
    """Encode a worker's options for the other nodes of its engine."""
    return json.dumps(asdict(options)).encode()


def node_options(encoded: bytes, node: int, model: str | None) -> EngineOptions:
    """Return the options of a worker's node. `model`: its model, if that has another path there.

    Raises EngineSettingError unless `encode_options` of the same version made them.
    """
    try:
        options = EngineOptions(**json.loads(encoded))
    except (TypeError, ValueError) as error:
        raise EngineSettingError(f"the worker's settings are unusable: {error}") from error
    return replace(options, model=model or options.model, arguments={**options.arguments, NODE: node})


def folder_key(model: str) -> str:
    """Return the key of a model folder's identity; empty for a name on a hub. Raises OSError."""
    return identify_model(model).key if Path(model).is_dir() else ""


class NodeRanks:
    """The ranks of one node."""

    def __init__(self, options: EngineOptions) -> None:
        """Store the options; `run` starts the ranks."""
        self._options = options
        self._record = Record()
        self._shared: Names = {}
        # Name of the files that the ranks share, once it is known.
        self.meeting = ""

    def run(self) -> str:
        """Start the ranks; return once one has ended, and say which. Blocks.

        Raises EngineSettingError for settings that vLLM does not accept.
        """
        remove_left_behind()
        executor = MultiprocExecutor(vllm_config(self._options), monitor_workers=False)
        handles = {handle.proc.sentinel: handle for handle in executor.workers}
        self._shared = names_of([os.getpid(), *(handle.proc.pid or 0 for handle in handles.values())])
        self._record.write(self._shared)
        _log.info("ranks %s are loaded", ", ".join(str(handle.rank) for handle in handles.values()))
        handle = handles[connection.wait(list(handles))[0]]
        return f"rank {handle.rank} (process {handle.proc.pid}) is gone"

    def clear(self) -> None:
        """Kill the ranks that still run and remove what they shared. Blocks for up to 5 s per rank."""
        shared = self._shared or names_of([os.getpid()])
        _clear(multiprocessing.active_children(), shared, self.meeting, self._record)
