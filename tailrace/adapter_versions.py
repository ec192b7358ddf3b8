"""Identify the version of a LoRA adapter in a folder.

Besides the model, it must be equal for one instance to continue another's answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Final

from tailrace.model_identity import WEIGHT_FILES, sampled_digest

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
