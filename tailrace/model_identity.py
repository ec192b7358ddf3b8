"""Identify the model that an engine runs: what must be equal for one engine to continue another's answer.

Wider than what lets two engines exchange KV (`InstanceRecord.model_fingerprint`, which also covers the
engine's version, the layout of its cache and more): an answer can be recomputed by any engine that runs the
same model.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Files that convert between text and token ids. Chat templates concern the API server only.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
# Fields of a model's configuration that describe its origin, not its content.
ORIGIN: Final = ("_name_or_path", "transformers_version")
_WHOLE_FILE_BYTES: Final = 64 << 20
_SAMPLE_BYTES: Final = 1 << 20


class ModelIdentity(msgspec.Struct, frozen=True):
    """The parts of a model's identity.

    `text`: digest of configuration and tokenizer. `weights`: digest of the weights; empty if they are not
    available, as on a machine with the tokenizer only. `precision`: number formats of weights, arithmetic and
    KV that an engine is configured to use; empty for a front end, which does not choose them.
    """

    text: Annotated[str, Meta(pattern="^[^:]+$")]
    weights: str = ""
    precision: str = ""

    @property
    def key(self) -> str:
        """Return the identity as used in messages: `text:weights:precision`, without unknown parts at the
        end."""
        return ":".join((self.text, self.weights, self.precision)).rstrip(":")


def covers(key: str, other: str) -> bool:
    """Return whether `other` equals `key`, or is one of those that a shorter `key` covers. The empty key
    covers all."""
    return not key or f"{other}:".startswith(f"{key}:")


def text_of(key: str) -> str:
    """Return the part of a key for configuration and tokenizer."""
    return key.partition(":")[0]


def fingerprint(key: str) -> str:
    """Return a key as twelve hexadecimal digits, for people; empty for the empty key."""
    return hashlib.blake2b(key.encode(), digest_size=6).hexdigest() if key else ""


def difference(source: ModelIdentity, target: ModelIdentity) -> str:
    """Return why the target cannot continue the source's answers, naming the setting; empty if it can."""
    if source.text != target.text:
        return "source and target run different models (--model): their configurations or tokenizers differ"
    if source.weights != target.weights:
        return "source and target have different weights (--model, --revision)"
    if source.precision != target.precision:
        return (
            "source and target compute in different formats (dtype, quantization, kv_cache_dtype): "
            f"{source.precision!r} against {target.precision!r}"
        )
    return ""


def identify_model(model: str, revision: str = "") -> ModelIdentity:
    """Identify a model by the contents of its folder or file, or a model name by the name and revision.

    Reads at most a few MiB of each large file. Raise OSError.
    """
    path = Path(model)
    if path.is_dir():
        return ModelIdentity(_text(path), _weights(path))
    if path.is_file():
        digest = file_digest(path)
        return ModelIdentity(digest, digest)
    digest = _digest(("name", model, revision))
    return ModelIdentity(digest, digest)


def weight_files(folder: Path) -> list[tuple[str, str, str]]:
    """Return name, size and digest of each file with weights."""
    files = sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})
    return [(file.name, str(file.stat().st_size), file_digest(file)) for file in files]


def file_digest(file: Path) -> str:
    """Return the digest of a small file, or of the first and last MiB of a large one."""
    if file.stat().st_size > _WHOLE_FILE_BYTES:
        return sampled_digest(file)
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def sampled_digest(file: Path) -> str:
    """Return the digest of a file's first and last MiB."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(stream.tell(), file.stat().st_size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _text(folder: Path) -> str:
    parts = [_config(folder / "config.json")]
    parts += [
        f"{name} {file_digest(folder / name)}" for name in _TOKENIZER_FILES if (folder / name).is_file()
    ]
    return _digest(parts)


def _config(file: Path) -> str:
    """Return the configuration without its origin, in canonical order; a file that is not a JSON object
    unchanged."""
    if not file.is_file():
        return ""
    text = file.read_text()
    try:
        config = json.loads(text)
    except ValueError:
        return text
    if not isinstance(config, dict):
        return text
    return json.dumps({name: value for name, value in config.items() if name not in ORIGIN}, sort_keys=True)


def _weights(folder: Path) -> str:
    files = weight_files(folder)
    return _digest(" ".join(file) for file in files) if files else ""


def _digest(facts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


# Identify the version of a LoRA adapter in a folder.
#
# Besides the model, it must be equal for one instance to continue another's answer.

_CONFIG: Final = "adapter_config.json"
_CACHE_MAX: Final = 1_024

# For each file: name, size, modification time and inode.
_Signature = tuple[tuple[str, int, int, int], ...]


class AdapterVersions:
    """Cache versions; read a folder again when its files change, at most 2 MiB of each. Not thread-safe."""

    def __init__(self) -> None:
        self._cache: OrderedDict[str, tuple[_Signature, str]] = OrderedDict()

    def of(self, path: str) -> str:
        """Return the version as sixteen hexadecimal digits for configuration and weights.

        Empty if there is nothing to read here, for instance if the path is a name on a hub.
        """
        folder = Path(path)
        try:
            files = _files(folder)
            signature = tuple(_file_signature(file) for file in files)
            if not signature:
                return ""
            cached = self._cache.get(path)
            if cached is not None and cached[0] == signature:
                return cached[1]
            version = _version(files)
        except OSError:
            return ""
        self._cache[path] = signature, version
        self._cache.move_to_end(path)
        if len(self._cache) > _CACHE_MAX:
            self._cache.popitem(last=False)
        return version


def engine_name(name: str, path: str, version: str) -> str:
    """Return the engine's name of an adapter, which is part of the names of its KV blocks."""
    return " ".join(filter(None, (name, path, version)))


def _files(folder: Path) -> list[Path]:
    files = {file for pattern in (_CONFIG, *WEIGHT_FILES) for file in folder.glob(pattern)}
    return sorted(files)


def _file_signature(file: Path) -> tuple[str, int, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns, status.st_ino


def _version(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} {sampled_digest(file)}\n".encode())
    return digest.hexdigest()
