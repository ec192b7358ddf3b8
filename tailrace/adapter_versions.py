"""Which version of a LoRA adapter is in a folder: what must be equal for one instance to go on with another's
answer, beside the model."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Final

from tailrace.model_identity import WEIGHT_FILES, sampled_digest

_CONFIG: Final = "adapter_config.json"
_KEPT: Final = 1_024

# Of each file: name, size, when it was last changed, and which file that is.
_Signature = tuple[tuple[str, int, int, int], ...]


class AdapterVersions:
    """Reads a folder again when its files have changed; at most 2 MiB of each. Not for several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[_Signature, str]] = OrderedDict()

    def of(self, path: str) -> str:
        """Sixteen hexadecimal digits for configuration and weights; empty: there is nothing to read here, as
        where the path is a name on a hub."""
        folder = Path(path)
        try:
            files = _files(folder)
            signature = tuple(_signed(file) for file in files)
            if not signature:
                return ""
            known = self._known.get(path)
            if known is not None and known[0] == signature:
                return known[1]
            version = _version(files)
        except OSError:
            return ""
        self._known[path] = signature, version
        self._known.move_to_end(path)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return version


def engine_name(name: str, path: str, version: str) -> str:
    """What an engine calls the adapter: part of the names of its KV blocks."""
    return " ".join(filter(None, (name, path, version)))


def _files(folder: Path) -> list[Path]:
    found = {file for pattern in (_CONFIG, *WEIGHT_FILES) for file in folder.glob(pattern)}
    return sorted(found)


def _signed(file: Path) -> tuple[str, int, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns, status.st_ino


def _version(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} {sampled_digest(file)}\n".encode())
    return digest.hexdigest()
