"""Wheels that a bundle makes itself: one of vLLM without some of its files, and small ones of our own."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

# The oldest date that zip files know: equal content gives equal bytes, so that parts stay the same.
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def trim_wheel(source: Path, target: Path, drop: Callable[[str], bool]) -> None:
    """Write `source` to `target` without the members that `drop` names, nor their lines in RECORD."""
    partial = target.with_suffix(".partial")
    with (
        zipfile.ZipFile(source) as wheel,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as trimmed,
    ):
        for member in wheel.infolist():
            if drop(member.filename):
                continue
            kept = zipfile.ZipInfo(member.filename, _DATE)
            kept.external_attr = member.external_attr
            kept.compress_type = zipfile.ZIP_DEFLATED
            data = wheel.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                data = _record_without(data, drop)
            trimmed.writestr(kept, data)
    partial.replace(target)


def _record_without(record: bytes, drop: Callable[[str], bool]) -> bytes:
    rows = csv.reader(io.StringIO(record.decode()))
    kept = io.StringIO()
    csv.writer(kept, lineterminator="\n").writerows(row for row in rows if row and not drop(row[0]))
    return kept.getvalue().encode()


def write_wheel(folder: Path, name: str, version: str, summary: str, files: Mapping[str, bytes]) -> Path:
    """Write a wheel of pure Python, without requirements, and return its path."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    contents = dict(sorted(files.items()))
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    ).encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tailrace\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    lines = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items()]
    contents[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in contents.items():
            entry = zipfile.ZipInfo(member, _DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return path


def unpacked_bytes(wheel: Path) -> int:
    """Bytes that a wheel takes when installed."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(member.file_size for member in archive.infolist())


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
