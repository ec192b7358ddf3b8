"""Which model an engine runs: what must be equal for one of them to go on with another's answer.

Wider than what lets two engines exchange KV (`InstanceRecord.model_fingerprint`, which has the engine's
version, its layout of the cache and more): an answer can be computed anew by any engine that runs the same
model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# What turns text into token ids and back. Chat templates are the API server's own business.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
# Of the model's configuration, what says where it came from and not what it is.
ORIGIN: Final = ("_name_or_path", "transformers_version")
_WHOLE_FILE_BYTES: Final = 64 << 20
_SAMPLE_BYTES: Final = 1 << 20


class ModelIdentity(msgspec.Struct, frozen=True):
    """`text`: digest of configuration and tokenizer. `weights`: digest of the weights; empty where there are
    none to look at, as on a machine that has the tokenizer alone. `precision`: the number formats of weights,
    arithmetic and KV that an engine was told to use; empty for a front end, which does not choose them."""

    text: str
    weights: str = ""
    precision: str = ""

    @property
    def key(self) -> str:
        """As it stands in messages: `text:weights:precision`, without what is not known at the end of it."""
        return ":".join((self.text, self.weights, self.precision)).rstrip(":")


def covers(key: str, other: str) -> bool:
    """Whether `other` is the same key, or one of those that a shorter `key` stands for. The empty key stands
    for all."""
    return not key or f"{other}:".startswith(f"{key}:")


def is_model(identity: ModelIdentity | None, key: str) -> bool:
    """Whether an instance of this identity runs the model of this key, or one of the models that a shorter
    key stands for. An empty key stands for all; an instance of a version that tells no identity may be any
    model."""
    return identity is None or covers(key, identity.key)


def text_of(key: str) -> str:
    """The part of a key that stands for configuration and tokenizer."""
    return key.partition(":")[0]


def fingerprint(key: str) -> str:
    """A key in twelve hexadecimal digits, for people; empty for the empty key."""
    return hashlib.blake2b(key.encode(), digest_size=6).hexdigest() if key else ""


def difference(source: ModelIdentity | None, target: ModelIdentity | None) -> str:
    """Why the target cannot go on with the source's answers, naming the setting; empty: it can."""
    if source is None or target is None:
        return "source or target does not tell which model it runs"
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
    """The identity of a model by what is in its folder, or its file; of a name, by the name and revision as
    given.

    Reads at most a few MiB of each large file. Raises OSError.
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
    """Name, size and digest of each file with weights."""
    files = sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})
    return [(file.name, str(file.stat().st_size), file_digest(file)) for file in files]


def file_digest(file: Path) -> str:
    """Of the whole file when it is small, else of its first and last MiB."""
    if file.stat().st_size > _WHOLE_FILE_BYTES:
        return sampled_digest(file)
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def sampled_digest(file: Path) -> str:
    """Of a file's first and last MiB."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(stream.tell(), file.stat().st_size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _text(folder: Path) -> str:
    found = [_config(folder / "config.json")]
    found += [
        f"{name} {file_digest(folder / name)}" for name in _TOKENIZER_FILES if (folder / name).is_file()
    ]
    return _digest(found)


def _config(file: Path) -> str:
    """The configuration without its origin, in one order. A file that is no JSON object stands as it is."""
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
