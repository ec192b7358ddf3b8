"""Imported for what it imports: all that a cell's process, or a rank's, needs before it can load a model.

That is most of what a small engine's start takes, so it is done once, in a process that others are forked
from.
"""

from __future__ import annotations

from benchmarks.models.triton_on_cpu import is_asked_for, use_model_runner_v2

if is_asked_for():
    use_model_runner_v2()

import vllm.model_executor.models
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import benchmarks.models.forked_ranks
import benchmarks.models.moves
import benchmarks.models.sink  # noqa: F401
import worker_agent.engine.vllm.engine_ranks
import worker_agent.engine.vllm.load
import worker_agent.engine.vllm.runner_extension
import worker_agent.engine.vllm.scheduler  # noqa: F401
