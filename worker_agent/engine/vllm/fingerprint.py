"""What KV is made of: two engines may exchange KV only if all of this is equal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
from vllm.config import ModelConfig
from vllm.version import __version__ as vllm_version

from worker_agent.engine.base import KvShape
from worker_agent.engine.vllm.load import LoadedCore

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20
# Of the model's configuration, what says where it came from and not what it is.
_ORIGIN = ("_name_or_path", "transformers_version")


def kv_shape(core: LoadedCore) -> KvShape:
    """Shape and identity of this engine's KV."""
    return KvShape(
        model_fingerprint=_fingerprint(core),
        block_tokens=core.block_tokens,
        num_layers=core.kv.num_layers,
        layer_block_bytes=core.kv.layer_block_bytes,
    )


def _fingerprint(core: LoadedCore) -> str:
    model, cache = core.config.model_config, core.config.cache_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _ORIGIN}
    facts = {
        "vllm": vllm_version.partition("+")[0],
        "config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "block_hash": str(cache.prefix_caching_hash_algo),
        "layout": f"{core.kv.device.type} {core.kv.layout}",
        "checksum": core.kv.checksum_name,
        "weights": _weights(model),
    }
    canonical = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def _weights(model: ModelConfig) -> list[tuple[str, ...]]:
    """Name, size and digest of each weight file; of a model by name, its name and revision."""
    folder = Path(model.model)
    if not folder.is_dir():
        return [(model.model, str(model.revision))]
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    return [(file.name, str(file.stat().st_size), _digest(file)) for file in files]


def _digest(file: Path) -> str:
    """Of the whole file when it is small, else of its first and last MiB."""
    size = file.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(stream.read())
        else:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(size - _SAMPLE_BYTES)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def ready_response(core: LoadedCore) -> bytes:
    """vLLM's EngineCoreReadyResponse for a front half, msgpack."""
    from vllm.v1.engine.core import EngineCoreProc

    return msgspec.msgpack.encode(EngineCoreProc._make_ready_response(core.core))
