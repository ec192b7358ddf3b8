"""Check a model's folder before anything is started with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tailrace.bounded import read_regular

# As Hugging Face and Mistral name a model's configuration.
_CONFIGURATIONS: Final = ("config.json", "params.json")
# Any of these may be, or contain, a tokenizer.
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
    "tokenization_*.py",
    "*.gguf",
)
# Flags of `vllm serve` with which the model's folder needs no tokenizer.
_TOKENIZER_FLAGS: Final = frozenset({"tokenizer", "skip_tokenizer_init"})


class ModelFolderError(ValueError):
    """A path holds no usable model; the message is one line that names the path."""


def require_files(model: str, flags: Iterable[str]) -> None:
    """Raise ModelFolderError unless there is a model, and a tokenizer where these flags of `vllm serve` say
    no other."""
    require_model(model)
    if _TOKENIZER_FLAGS.isdisjoint(flags):
        require_tokenizer(model)


def require_model(model: str) -> None:
    """Raise ModelFolderError for a path without a model. Other names, those of a hub, are not checked."""
    folder = Path(model).expanduser()
    if folder.is_file():
        if folder.suffix != ".gguf":
            raise ModelFolderError(f"{model} is a file; name the folder that holds the model")
        return
    if not folder.is_dir():
        if _is_path(model):
            raise ModelFolderError(f"no folder {model}")
        return
    if not _has_any(folder, _CONFIGURATIONS):
        raise ModelFolderError(f"{model} has no {_CONFIGURATIONS[0]}")


def _is_path(model: str) -> bool:
    """Return whether this can only be a path: a hub's names are NAME or OWNER/NAME."""
    if "://" in model:
        return False
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def require_tokenizer(model: str) -> None:
    """Raise ModelFolderError for a folder without a tokenizer."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not _has_any(folder, _TOKENIZERS):
        raise ModelFolderError(f"{model} has no tokenizer ({_TOKENIZERS[0]})")


def has_chat_template(model: str) -> bool:
    """Return whether a folder's tokenizer has a chat template; True for other names, those of a hub."""
    folder = Path(model).expanduser()
    # Mistral's own tokenizers have theirs built in.
    if not folder.is_dir() or _has_any(folder, ("chat_template*", "*chat_templates", "tekken.json")):
        return True
    try:
        config: object = json.loads(read_regular(folder / "tokenizer_config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _has_any(folder: Path, patterns: Iterable[str]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))
