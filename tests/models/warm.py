"""Import everything that a cell's process, or a rank's, needs before it can load a model.

This is most of the start of a small engine, so it is done once, in a process from which others are forked.
"""

from __future__ import annotations

from tests.models.triton_on_cpu import is_requested, use_model_runner_v2

if is_requested():
    use_model_runner_v2()

import vllm.model_executor.models
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import tests.models.forked_ranks
import tests.models.moves
import tests.models.sink  # noqa: F401
import worker_agent.engine.vllm.load
import worker_agent.engine.vllm.ranks
import worker_agent.engine.vllm.runner_extension
import worker_agent.engine.vllm.scheduler  # noqa: F401
