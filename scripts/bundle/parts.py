"""Cutting files into parts of a bounded size, and the manifest that puts them together again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from scripts.bundle.install_bundle import (
    FORMAT,
    MANIFEST,
    BundledFile,
    Manifest,
    Part,
    Segment,
    sha256_of,
)
from scripts.bundle.wheels import unpacked_bytes

_CHUNK: Final = 1 << 20


def cut(files: Iterable[tuple[str, int]], part_bytes: int) -> list[tuple[Segment, ...]]:
    """Segments of each part: the files one after the other, cut every `part_bytes`. No file is empty."""
    parts: list[tuple[Segment, ...]] = []
    current: list[Segment] = []
    room = part_bytes
    for name, size in files:
        offset = 0
        while offset < size:
            taken = min(room, size - offset)
            current.append(Segment(name, offset, taken))
            offset, room = offset + taken, room - taken
            if not room:
                parts.append(tuple(current))
                current, room = [], part_bytes
    if current:
        parts.append(tuple(current))
    return parts


def write_parts(
    groups: Sequence[Sequence[Path]], folder: Path, name: str, part_bytes: int
) -> tuple[tuple[BundledFile, ...], tuple[Part, ...]]:
    """Write the parts of a bundle; return the files in order and the parts.

    A group begins a part of its own: when one group changes, the parts of those before it stay as they are.
    """
    files = tuple(
        BundledFile(path.name, path.stat().st_size, sha256_of(path), unpacked_bytes(path))
        for group in groups
        for path in group
    )
    paths = {path.name: path for group in groups for path in group}
    if len(paths) != len(files):
        raise ValueError("two files of one name")
    layout: list[tuple[Segment, ...]] = []
    for group in groups:
        layout += cut(((path.name, path.stat().st_size) for path in group), part_bytes)
    parts = []
    for number, segments in enumerate(layout, 1):
        target = folder / f"{name}.part-{number:03d}"
        digest = hashlib.sha256()
        with target.open("wb") as writer:
            for segment in segments:
                for block in _blocks(paths[segment.file], segment):
                    digest.update(block)
                    writer.write(block)
        parts.append(Part(target.name, target.stat().st_size, digest.hexdigest(), segments))
    return files, tuple(parts)


def _blocks(path: Path, segment: Segment) -> Iterable[bytes]:
    left = segment.size
    with path.open("rb") as reader:
        reader.seek(segment.offset)
        while left:
            block = reader.read(min(_CHUNK, left))
            if not block:
                raise EOFError(f"{path} became shorter")
            left -= len(block)
            yield block


def write_manifest(folder: Path, manifest: Manifest, left_out: dict[str, str]) -> Path:
    """Write `manifest.json`; `left_out` (what: why) is there for readers and is not read back."""
    path = folder / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, **asdict(manifest), "left_out": left_out}, indent=1) + "\n")
    return path
