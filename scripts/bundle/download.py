"""Wheels from the package index, kept in a cache folder: the next bundle downloads what is new alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from scripts.bundle.pins import Pin

# Where torch's CPU build is, which PyPI does not carry. Torch alone is taken from there: with two indexes at
# once, pip would take any package from either.
_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"


class DownloadError(RuntimeError):
    """pip could not get a wheel; the message has its last lines."""


def download(pins: Sequence[Pin], cache: Path, options: Sequence[str]) -> list[Path]:
    """Return a wheel for each pin, in the pins' order. `options`: pip's, for another target than here."""
    cache.mkdir(parents=True, exist_ok=True)
    absent = [pin for pin in pins if _wheel(pin, cache) is None]
    own_index = [pin for pin in absent if pin.version.endswith("+cpu")]
    for pin in own_index:
        try:
            _pip([pin], cache, options)
        except DownloadError:
            _pip([pin], cache, [*options, "--index-url", _TORCH_INDEX])
    # pip takes either no hash or one for each package.
    for hashed in (True, False):
        rest = [pin for pin in absent if pin not in own_index and bool(pin.hashes) is hashed]
        if rest:
            print(f"bundle: downloading {len(rest)} of {len(pins)} packages to {cache}", flush=True)
            _pip(rest, cache, options)
    return [_found(pin, cache) for pin in pins]


def _pip(pins: Sequence[Pin], cache: Path, options: Iterable[str]) -> None:
    requirements = cache / "requirements.txt"
    requirements.write_text("".join(f"{pin.line()}\n" for pin in pins))
    hashes = ["--require-hashes"] if pins[0].hashes else []
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(cache), *hashes, *options]
    command += ["--requirement", str(requirements)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        saved = 0
        for line in process.stdout:
            lines.append(line)
            if "Downloading" in line and " MB)" in line:
                print(f"bundle:   {line.strip()}", flush=True)
            if line.startswith("Saved "):
                saved += 1
                if saved % 50 == 0:
                    print(f"bundle:   {saved} of {len(pins)}", flush=True)
    if process.returncode != 0:
        raise DownloadError("".join(lines[-8:]).strip())


def _found(pin: Pin, cache: Path) -> Path:
    wheel = _wheel(pin, cache)
    if wheel is None:
        raise DownloadError(f"pip brought no wheel of {pin.name} {pin.version}")
    return wheel


def _wheel(pin: Pin, cache: Path) -> Path | None:
    for path in cache.glob("*.whl"):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if canonicalize_name(name) == pin.name and str(version) == pin.version:
            return path
    return None
