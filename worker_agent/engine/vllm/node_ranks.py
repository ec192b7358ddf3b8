"""The ranks of an engine on a machine that is not the worker's.

As in `vllm serve --headless`, vLLM's executor starts them, and they take their orders from the worker's
engine core.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing import connection
from pathlib import Path
from typing import Final

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tailrace.model_identity import identify_model
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.vllm.settings import VllmSettings, vllm_config
from worker_agent.parallel.node_span import NODE
from worker_agent.parallel.rank_leftovers import Names, Record, names_of, remove, remove_meeting

_log = logging.getLogger(__name__)

# Deadline for a killed process to end.
_JOIN_S: Final = 5.0


def encode_settings(settings: VllmSettings) -> bytes:
    """Encode a worker's settings for the other nodes of its engine."""
    return json.dumps(asdict(settings)).encode()


def node_settings(encoded: bytes, node: int, model: str | None) -> VllmSettings:
    """Return the settings of a worker's node. `model`: its model, if that has another path there.

    Raises EngineSettingError unless `encode_settings` of the same version made them.
    """
    try:
        settings = VllmSettings(**json.loads(encoded))
    except (TypeError, ValueError) as error:
        raise EngineSettingError(f"the worker's settings are unusable: {error}") from error
    return replace(settings, model=model or settings.model, engine_args={**settings.engine_args, NODE: node})


def folder_key(model: str) -> str:
    """Return the key of a model folder's identity; empty for a name on a hub. Raises OSError."""
    return identify_model(model).key if Path(model).is_dir() else ""


class NodeRanks:
    """The ranks of one node."""

    def __init__(self, settings: VllmSettings) -> None:
        """Store the settings; `run` starts the ranks."""
        self._settings = settings
        self._record = Record(f"{settings.owner} node {settings.engine_args.get(NODE)}")
        self._shared: Names = {}
        # Name of the files that the ranks share, once it is known.
        self.meeting = ""

    def run(self) -> str:
        """Start the ranks; return once one has ended, and say which. Blocks.

        Raises EngineSettingError for settings that vLLM does not accept.
        """
        self._record.remove_recorded()
        executor = MultiprocExecutor(vllm_config(self._settings), monitor_workers=False)
        handles = {handle.proc.sentinel: handle for handle in executor.workers}
        self._shared = names_of([os.getpid(), *(handle.proc.pid or 0 for handle in handles.values())])
        self._record.write(self._shared)
        _log.info("ranks %s are loaded", ", ".join(str(handle.rank) for handle in handles.values()))
        handle = handles[connection.wait(list(handles))[0]]
        return f"rank {handle.rank} (process {handle.proc.pid}) is gone"

    def clear(self) -> None:
        """Kill the ranks that still run and remove what they shared. Blocks for up to 5 s per rank."""
        ranks: Sequence[multiprocessing.process.BaseProcess] = multiprocessing.active_children()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(_JOIN_S)
        remove(self._shared or names_of([os.getpid()]))
        remove_meeting(self.meeting)
        self._record.clear()
