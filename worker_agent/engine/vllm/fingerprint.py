"""The fingerprint of an engine's KV: engines can exchange KV only if their fingerprints are equal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import msgspec
from msgspec.structs import replace
from vllm.config import ModelConfig
from vllm.version import __version__ as vllm_version

from tailrace.model_identity import ORIGIN, ModelIdentity, identify_model, weight_files
from worker_agent.engine.base import KvShape
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.rank_facts import kv_name


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
        "model_runner": 1 if core.keeps_generators else 2,
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
