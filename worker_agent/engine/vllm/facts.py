"""What an engine tells of itself: at its start its KV and its model, and later snapshots for reports.

Snapshots are taken on the event loop without locks while the engine thread runs. Engines can exchange KV only
if the fingerprints of their KV are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace
from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start
from vllm.config import ModelConfig
from vllm.v1.request import RequestStatus
from vllm.version import __version__ as vllm_version

from tailrace.model_identity import ORIGIN, ModelIdentity, identify_model, weight_files
from worker_agent.engine.base import EngineStats, KvShape, RequestStats
from worker_agent.engine.vllm.cache_watch import CacheWatch, expected_hit_tokens
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.outputs import OutputWriter
from worker_agent.engine.vllm.rank_facts import kv_name
from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests


def kv_shape(core: LoadedCore) -> KvShape:
    """Return the shape and identity of this engine's KV."""
    return KvShape(
        model_fingerprint=_fingerprint(core),
        block_tokens=core.block_tokens,
        num_layers=sum(rank.num_layers for rank in core.ranks),
        layer_block_bytes=core.ranks[0].layer_block_bytes,
        tensor_parallel_size=core.config.parallel_config.tensor_parallel_size,
        pipeline_parallel_size=core.config.parallel_config.pipeline_parallel_size,
    )


def _fingerprint(core: LoadedCore) -> str:
    model, cache = core.config.model_config, core.config.cache_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in ORIGIN}
    facts = {
        "vllm": vllm_version.partition("+")[0],
        "config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "block_hash": str(cache.prefix_caching_hash_algo),
        "ranks": kv_name(core.ranks),
        # The same seed yields different draws in vLLM's two model runners.
        "model_runner": 1 if core.keeps_states else 2,
        "weights": _weights(model),
    }
    if core.nodes > 1:
        # Part of their KV is where no worker can read it.
        facts["nodes"] = core.nodes
    canonical = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def identity(model: str, core: LoadedCore) -> ModelIdentity:
    """Return the identity of this engine's model; `model` is the configured folder or name."""
    config, cache = core.config.model_config, core.config.cache_config
    precision = f"{config.dtype} {config.quantization} {cache.cache_dtype}".replace("torch.", "")
    return replace(identify_model(model, config.revision or ""), precision=precision)


def _weights(model: ModelConfig) -> list[tuple[str, ...]]:
    """Return name, size and digest of each weight file; for a model given by name, its name and revision."""
    folder = Path(model.model)
    if not folder.is_dir():
        return [(model.model, str(model.revision))]
    return [*weight_files(folder)]


def ready_response(core: LoadedCore) -> bytes:
    """Return vLLM's EngineCoreReadyResponse for an API server, in msgpack.

    To the API server the fleet is one engine core, so a data-parallel rank must not look like one of several.
    """
    from vllm.v1.engine.core import EngineCoreProc

    response = EngineCoreProc._make_ready_response(core.core)
    return msgspec.msgpack.encode(dataclasses.replace(response, data_parallel_size=1))


class Compilations:
    """Count torch's compilations in this process from now on. Written by the compiling thread, read by any.

    vLLM compiles some functions when a request first needs them, for log-probabilities for example. The
    engine thread then waits for a C++ or a Triton compiler, on a busy machine for much longer than for any
    step before, and must not be taken for hung.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.running = False
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self.running = True

    def _end(self, _: CallbackArgs) -> None:
        self.finished += 1
        self.running = False


def engine_stats(
    core: LoadedCore,
    table: VllmRequests,
    writer: OutputWriter,
    cache: CacheWatch | None,
    compilations: Compilations,
) -> EngineStats:
    """Return the engine's statistics. `cache` is None if the engine has no prefix cache."""
    entries = list(table)
    mean_ms, p99_ms = writer.intervals.mean_and_p99_ms(time.monotonic())
    backlog = sum(_backlog(core, entry, cache) for entry in entries)
    # vLLM counts a step's tokens as computed when the step begins.
    ahead = min(core.config.scheduler_config.max_num_batched_tokens, backlog + len(entries))
    tier = core.scheduler.tailrace_connector.tier
    return EngineStats(
        requests=[request_stats(core, entry) for entry in entries],
        kv_blocks_used=core.kv_blocks_used,
        kv_blocks_total=core.kv_blocks_total,
        host_kv_bytes_used=core.host.used * core.host.block_bytes,
        host_kv_bytes_total=core.host.total * core.host.block_bytes,
        swaps_out=core.host.swapped_out,
        swaps_in=core.host.swapped_in,
        swaps_refused=core.host.refused,
        host_kv_corrupt_blocks=0 if core.host_pool is None else core.host_pool.corrupt_blocks,
        prefill_backlog_tokens=backlog,
        # A step in lockstep takes as long as that of the data-parallel rank with the longest.
        expected_step_s=None
        if core.lockstep is not None
        else writer.times.expected_s(max(core.scheduler.scheduled_tokens, ahead)),
        compilations=compilations.finished,
        compiling=compilations.running,
        steps=writer.steps,
        generated_tokens=writer.generated_tokens,
        prompt_tokens=writer.prompt_tokens,
        cached_prompt_tokens=writer.cached_prompt_tokens,
        host_cached_prompt_tokens=writer.loaded_prompt_tokens if tier is not None else 0,
        host_cached_bytes=core.host.cached * core.host.block_bytes,
        host_blocks_stored=core.host.stored,
        host_blocks_loaded=tier.loaded_blocks if tier is not None else 0,
        host_blocks_dropped=core.host.dropped,
        preemptions=core.scheduler.preemptions,
        kept_back_steps=core.scheduler.kept_back_steps,
        order_mistake="" if core.intra is None else core.intra.mistake,
        token_interval_ms_mean=mean_ms,
        token_interval_ms_p99=p99_ms,
    )


def request_stats(core: LoadedCore, entry: VllmRequest) -> RequestStats:
    """Return what the engine's statistics say of one request."""
    request, swapped = entry.request, core.host.get(entry.request_id)
    return RequestStats(
        request_id=entry.request_id,
        frontend_id=entry.frontend_id,
        epoch=entry.epoch,
        phase=entry.phases.phase,
        state=_state(core, entry),
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=entry.emitted,
        reasoning_tokens=entry.phases.reasoning_tokens,
        max_tokens=entry.max_output_tokens(core.max_model_len),
        kv_blocks=-(-request.num_computed_tokens // core.block_tokens),
        kv_on_host=core.host.get(entry.request_id) is not None,
        arrival_s=request.arrival_time,
        token_interval_ms=entry.pace.interval_ms,
        demoted=core.intra is not None and core.intra.demoted(entry.view),
        host_kv_blocks=0 if swapped is None else len(swapped.slots),
        predicted_remaining_tokens=entry.predicted_remaining(core.max_model_len),
    )


def _state(core: LoadedCore, entry: VllmRequest) -> str:
    status = entry.request.status
    if entry.request_id in core.scheduler.paused:
        return "paused"
    if status == RequestStatus.RUNNING:
        return "running"
    if core.host.get(entry.request_id) is not None:
        return "preempted"
    if status == RequestStatus.PREEMPTED and entry.request_id not in core.scheduler.adopted:
        return "preempted"
    return "waiting"


def _backlog(core: LoadedCore, entry: VllmRequest, cache: CacheWatch | None) -> int:
    """Return the tokens to compute before the request's next output token; 0 if it only needs that one."""
    if core.host.get(entry.request_id) is not None:
        return 0
    left: int = entry.request.num_tokens - entry.request.num_computed_tokens
    if cache is not None:
        left -= expected_hit_tokens(entry.request, cache.book, core.block_tokens)
    return left if left > 1 else 0
