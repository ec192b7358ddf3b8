"""Figures of runs, kept on disk as they are made, so that an interrupted call does not cost them.

One file for a user, in the cache folder: a line that names the version of the code, then a line a run.
Another version's figures are dropped, since it could have computed others. A run is known by what it calls,
with which arguments, and the state of the traces that it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from experiments.claims.base import Figures, Run, plain_figures

_FILE: Final = "claims.jsonl"
# The packages whose code and data decide the figures of claims.
_PACKAGES: Final = ("experiments.claims", "simulator", "tailrace")


def default_file() -> Path:
    """Return the user's file: `tailrace/claims.jsonl` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / _FILE


def code_version(names: Sequence[str] = _PACKAGES) -> str:
    """Return a digest of all files of the packages and modules that decide figures, and of the
    interpreter."""
    digest = hashlib.sha256(f"{platform.python_version()} {np.__version__}".encode())
    for name in names:
        spec = find_spec(name)
        for folder in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix != ".pyc" and p.is_file()):
                digest.update(f"{name}/{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes())
        if spec and spec.submodule_search_locations is None and spec.origin is not None:
            digest.update(f"{name}\0".encode())
            digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()[:16]


class KeptFigures:
    """The figures in a file, and those added to it. What cannot be read counts as not there."""

    def __init__(self, path: Path, version: str, traces: Path | None = None, *, fresh: bool = False) -> None:
        """Open the file, and empty it if it is `fresh` or of another version. Raise OSError."""
        self.path = path
        self._traces = traces
        self._traces_state = _state(traces) if traces is not None else ""
        header = json.dumps({"version": version})
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [] if fresh or not path.is_file() else path.read_text("utf-8", "replace").split("\n")
        self._known = dict(_read(lines[1:])) if lines[:1] == [header] else {}
        # Whether figures of another version were dropped.
        self.dropped = len(lines) > 1 and lines[0] != header
        if not self._known:
            beginning = path.with_suffix(".new")
            beginning.write_text(header + "\n", encoding="utf-8")
            # Whoever still writes figures of another version keeps its own file.
            beginning.replace(path)
        self._file = path.open("a", encoding="utf-8")
        if self._known and lines[-1]:
            # The last line was cut off.
            self._file.write("\n")

    def get(self, run: Run) -> Figures | None:
        """Return the figures of a run, None if there are none."""
        return self._known.get(self._key(run))

    def add(self, run: Run, figures: Figures) -> None:
        """Add the figures of a run, on disk when this returns. Raise OSError."""
        # One write, so that two calls at a time do not mix their lines.
        self._file.write(json.dumps([self._key(run), plain_figures(figures)]) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _key(self, run: Run) -> str:
        work = f"{run.measure.__module__}.{run.measure.__qualname__}{run.arguments!r}"
        reads_traces = self._traces is not None and str(self._traces) in map(str, run.arguments)
        return f"{work} {self._traces_state}" if reads_traces else work


def _read(lines: list[str]) -> Mapping[str, Figures]:
    known: dict[str, Figures] = {}
    for line in lines:
        try:
            key, figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(key, str) and isinstance(figures, dict):
            known[key] = figures
    return known


def _state(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a folder's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(folder)), path.stat()) for path in files]
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()[:16]
