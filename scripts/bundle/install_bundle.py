#!/usr/bin/env python3
"""Install a Tailrace bundle: parts in any order, from any folders, every byte checked against the manifest.

    python3 install_bundle.py --into FOLDER [FILE_OR_FOLDER ...]

FOLDER becomes a Python environment (FOLDER/bin/tailrace). Parts may come a few at a time: what a call brings
is checked and kept in FOLDER.parts, and a call that brings the last one installs. Needs Python's standard
library alone, no network, no root.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
# Exit statuses.
DAMAGED: Final = 1
USAGE: Final = 2
INCOMPLETE: Final = 3

_CHUNK: Final = 1 << 20
# One pip run for this much: so there is progress to show, and a run that is cut off resumes near its end.
_BATCH_BYTES: Final = 200_000_000
_BATCH_FILES: Final = 40
_PIP_TIMEOUT_S: Final = 1800
_COMPILE_TIMEOUT_S: Final = 1800


class BundleError(Exception):
    """Something about the bundle, its parts or this host is not right; the message is one line."""

    def __init__(self, message: str, status: int = DAMAGED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Segment:
    """`size` bytes of a part that are bytes `offset` and following of `file`."""

    file: str
    offset: int
    size: int


@dataclass(frozen=True)
class Part:
    """One file of the bundle as it is carried: its segments one after the other, nothing else."""

    name: str
    size: int
    sha256: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BundledFile:
    """One wheel; `unpacked` is the bytes that it takes when installed."""

    name: str
    size: int
    sha256: str
    unpacked: int


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds. The host's Python must have `host_modules`; `checks` are imported at the end;
    `environment`: variables that the environment's Python has unless they are set."""

    name: str
    python: str
    machine: str
    files: tuple[BundledFile, ...]
    parts: tuple[Part, ...]
    host_modules: tuple[str, ...]
    checks: tuple[str, ...]
    environment: dict[str, str]

    @staticmethod
    def read(path: Path) -> Manifest:
        """Raise BundleError for a file that is none, or that has names which lead out of a folder."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise BundleError(f"{path}: format {data['format']}; this installer knows {FORMAT}", USAGE)
            manifest = Manifest(
                name=data["name"],
                python=data["python"],
                machine=data["machine"],
                files=tuple(BundledFile(**entry) for entry in data["files"]),
                parts=tuple(
                    Part(p["name"], p["size"], p["sha256"], tuple(Segment(**s) for s in p["segments"]))
                    for p in data["parts"]
                ),
                host_modules=tuple(data["host_modules"]),
                checks=tuple(data["checks"]),
                environment=dict(data["environment"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path} is no manifest of a bundle: {error}", USAGE) from error
        for name in [f.name for f in manifest.files] + [s.file for p in manifest.parts for s in p.segments]:
            if name != PurePosixPath(name).name or name in ("", ".", ".."):
                raise BundleError(f"{path}: {name!r} is no plain file name", USAGE)
        return manifest


def sha256_of(path: Path) -> str:
    """Hash of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def megabytes(size: int) -> str:
    """Bytes, for a person."""
    return f"{size / 1e6:,.1f} MB"


class Staging:
    """Where the files are put together again. Its file `done` has the hash of each part that is in."""

    def __init__(self, folder: Path, manifest: Manifest, needed: Iterable[BundledFile]) -> None:
        """`needed`: the files that are to be installed; a part that has none of them need not come."""
        names = {file.name for file in needed}
        self._folder = folder
        self._parts = [p for p in manifest.parts if any(s.file in names for s in p.segments)]
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BundleError(f"{folder} is in use by another run of this installer", USAGE) from error
        self._record = folder / "done"
        known = self._record.read_text().split() if self._record.exists() else []
        self._done = {part.sha256 for part in self._parts}.intersection(known)

    @property
    def missing(self) -> list[Part]:
        """Parts that have not come yet."""
        return [part for part in self._parts if part.sha256 not in self._done]

    @property
    def progress(self) -> str:
        """How many parts are in."""
        return f"{len(self._parts) - len(self.missing)} of {len(self._parts)} parts"

    def path(self, file: BundledFile) -> Path:
        """Where a file is, whole once nothing is missing."""
        return self._folder / file.name

    def take(self, source: Path, part: Part) -> bool:
        """Copy a part's bytes to their places while hashing them. False if they were not the part's."""
        digest = hashlib.sha256()
        with source.open("rb") as reader:
            for segment in part.segments:
                self._copy(reader.fileno(), segment, digest)
        if digest.hexdigest() != part.sha256:
            return False
        self._done.add(part.sha256)
        with self._record.open("a") as record:
            record.write(f"{part.sha256}\n")
            record.flush()
            os.fsync(record.fileno())
        return True

    def _copy(self, reader: int, segment: Segment, digest: hashlib._Hash) -> None:
        target = os.open(self._folder / segment.file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            at, left = segment.offset, segment.size
            while left and (block := os.read(reader, min(_CHUNK, left))):
                digest.update(block)
                written = 0
                while written < len(block):
                    written += os.pwrite(target, block[written:], at + written)
                at, left = at + len(block), left - len(block)
            os.fsync(target)
        finally:
            os.close(target)

    def forget(self, file: BundledFile) -> list[Part]:
        """Drop a file that is not what it should be; return the parts that have to come again."""
        self.path(file).unlink(missing_ok=True)
        again = [p for p in self._parts if any(s.file == file.name for s in p.segments)]
        self._done -= {part.sha256 for part in again}
        self._record.write_text("".join(f"{value}\n" for value in sorted(self._done)))
        return again


def candidates(places: Iterable[Path], manifest: Manifest) -> Iterator[Path]:
    """Files that may be parts: all that are named; of a folder, those with a part's name or size."""
    names = {part.name for part in manifest.parts}
    sizes = {part.size for part in manifest.parts}
    for place in places:
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if path.is_file() and (path.name in names or path.stat().st_size in sizes):
                    yield path
        elif place.is_file():
            yield place
        else:
            raise BundleError(f"{place}: no such file or folder", USAGE)


def collect(places: Iterable[Path], manifest: Manifest, staging: Staging, say: Say) -> None:
    """Take every part that is found. Raise BundleError when a file has a part's name and other bytes."""
    by_name = {part.name: part for part in manifest.parts}
    damaged: list[str] = []
    for path in candidates(places, manifest):
        missing = staging.missing
        if not missing:
            return
        named = by_name.get(path.name)
        if named is not None and named not in missing:
            continue
        size = path.stat().st_size
        if named is not None and size == named.size and staging.take(path, named):
            _taken(named, staging, say)
            continue
        # A part under another name, or a damaged one.
        if any(part.size == size for part in missing):
            digest = sha256_of(path)
            part = next((p for p in missing if p.sha256 == digest), None)
            if part is not None and staging.take(path, part):
                _taken(part, staging, say)
                continue
        if named is not None:
            expected = "" if size == named.size else f" ({size:,} bytes; it has {named.size:,})"
            damaged.append(f"{path}{expected}")
        elif not any(part.size == size for part in manifest.parts):
            say(f"{path} is no part of {manifest.name}: left alone")
    if damaged:
        raise BundleError(f"damaged, copy again: {', '.join(damaged)}")


def _taken(part: Part, staging: Staging, say: Say) -> None:
    say(f"{part.name}: {megabytes(part.size)}, correct ({staging.progress})")


class Say:
    """Lines for the user, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:5.0f} s] {line}", flush=True)


def check_host(manifest: Manifest, python: str) -> dict[str, str]:
    """Folders of the host's modules by name. Raise BundleError where the bundle is for another host."""
    if platform.machine() != manifest.machine or not sys.platform.startswith("linux"):
        here = f"{platform.system()} on {platform.machine()}"
        raise BundleError(f"{manifest.name} is for Linux on {manifest.machine}; this is {here}", USAGE)
    ask = (
        "import importlib.util as u, json, sys; "
        "print(json.dumps([list(sys.version_info[:2]), {n: (s.origin if (s := u.find_spec(n)) else None)"
        " for n in sys.argv[1:]}]))"
    )
    try:
        done = subprocess.run(
            [python, "-c", ask, *manifest.host_modules],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        (major, minor), found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BundleError(f"{python} is no Python that runs: {error}", USAGE) from error
    if f"{major}.{minor}" != manifest.python:
        raise BundleError(
            f"{manifest.name} is for Python {manifest.python}; {python} is {major}.{minor}"
            f" (name another with --python, or make the bundle with BUNDLE_PYTHON={major}.{minor})",
            USAGE,
        )
    absent = [name for name, origin in found.items() if origin is None]
    if absent:
        raise BundleError(
            f"{python} has no {', '.join(absent)}, which this bundle leaves to the host"
            " (name the Python that has it with --python, or make the bundle without TORCH=host)",
            USAGE,
        )
    return {name: str(Path(origin).parent.parent) for name, origin in found.items()}


def check_room(needed: int, folder: Path) -> None:
    """Raise BundleError when the disk cannot hold `needed` bytes: the files and what they unpack to."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise BundleError(f"{place} has {megabytes(free)} free; {megabytes(needed)} are needed", USAGE)


def make_environment(
    folder: Path, python: str, host_folders: Iterable[str], variables: Mapping[str, str]
) -> Path:
    """Make FOLDER a virtual environment, with the host's packages behind its own, where these variables have
    these values unless they are set. Return its interpreter."""
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        # Without pip: Debian's Python has no ensurepip, and the bundle brings a pip.
        command = [python, "-m", "venv", "--without-pip", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise BundleError(f"{python} cannot make an environment: {(done.stderr or done.stdout).strip()}")
    # A .pth file's folders come after the environment's own: what the bundle brings is found first.
    (site,) = (folder / "lib").glob("python3.*/site-packages")
    lines = sorted(set(host_folders))
    if lines:
        (site / "zz-tailrace-host.pth").write_text("".join(f"{line}\n" for line in lines))
    # Python runs the lines of a .pth file that begin with `import` whenever it starts.
    defaults = (f"import os; os.environ.setdefault({name!r}, {variables[name]!r})\n" for name in variables)
    (site / "zz-tailrace-environment.pth").write_text("".join(defaults))
    return interpreter


def batches(files: Iterable[BundledFile]) -> Iterator[list[BundledFile]]:
    """Files for one pip run each, small enough that progress shows."""
    batch: list[BundledFile] = []
    for file in files:
        full = sum(f.size for f in batch) + file.size > _BATCH_BYTES or len(batch) == _BATCH_FILES
        if batch and full:
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


class Installed:
    """What an environment has from bundles: each wheel's hash by its name, in `tailrace-bundle.json`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tailrace-bundle.json"
        self._files: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def lacks(self, files: Iterable[BundledFile]) -> list[BundledFile]:
        """Files that are not installed, or with other bytes."""
        return [file for file in files if self._files.get(file.name) != file.sha256]

    def add(self, files: Iterable[BundledFile]) -> None:
        """Note what was installed."""
        self._files |= {file.name: file.sha256 for file in files}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._files, indent=1))
        partial.replace(self._path)


def install(
    manifest: Manifest, files: Sequence[BundledFile], staging: Staging, interpreter: Path, say: Say
) -> None:
    """Install `files` with the bundle's pip, which is in the environment itself after the first time."""
    folder = interpreter.parent.parent
    installed = Installed(folder)
    pip = next(file for file in manifest.files if file.name.startswith("pip-"))
    runner = [f"{staging.path(pip)}/pip"] if pip in files else ["-m", "pip"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    count = 0
    for batch in batches(files):
        command = [str(interpreter), "-I", *runner, "--isolated", "install", "--quiet", "--force-reinstall"]
        command += ["--no-index", "--no-deps", "--no-compile", "--no-warn-script-location"]
        command += ["--disable-pip-version-check", "--root-user-action=ignore"]
        command += [str(staging.path(file)) for file in batch]
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_PIP_TIMEOUT_S
        )
        if result.returncode != 0:
            raise BundleError(f"pip failed: {(result.stderr or result.stdout).strip()[-2000:]}")
        installed.add(batch)
        count += len(batch)
        say(f"{count} of {len(files)} packages installed")
    _link_rust_front_end(folder)
    say("compiling Python's byte code")
    # Of no consequence where it fails: Python then compiles what it imports, in each process that does.
    compiler = [str(interpreter), "-I", "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    subprocess.run(compiler, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_COMPILE_TIMEOUT_S)


def _link_rust_front_end(folder: Path) -> None:
    """Make vLLM's Rust front end, where the bundle has it, a command of the environment."""
    for carried in (folder / "lib").glob("python3.*/site-packages/vllm/vllm-rs"):
        carried.chmod(0o755)
        link = folder / "bin" / "vllm-rs"
        link.unlink(missing_ok=True)
        link.symlink_to(carried)


def imports_of(manifest: Manifest, interpreter: Path) -> list[str]:
    """Import each of `checks` in a process of its own; return what failed, one line each."""
    failed = []
    for module in manifest.checks:
        try:
            done = subprocess.run(
                [str(interpreter), "-I", "-c", f"import {module}"],
                capture_output=True,
                text=True,
                timeout=300,
                cwd=interpreter.parent,
            )
        except subprocess.TimeoutExpired:
            failed.append(f"{module}: not imported within 300 s")
            continue
        if done.returncode != 0:
            failed.append(f"{module}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return failed


def verified(files: Iterable[BundledFile], staging: Staging) -> None:
    """Raise BundleError unless each file has the bytes that the manifest says."""
    for file in files:
        path = staging.path(file)
        if path.exists() and path.stat().st_size > file.size:
            os.truncate(path, file.size)  # left by a longer file of that name, of an older bundle
        if not path.exists() or sha256_of(path) != file.sha256:
            again = ", ".join(part.name for part in staging.forget(file))
            raise BundleError(f"{path} is not what it was: bring these parts again: {again}", INCOMPLETE)


def run(options: argparse.Namespace) -> None:
    """Do what the command line says. Raise BundleError with one line where that cannot be."""
    say = Say()
    beside = Path(__file__).resolve().parent
    path: Path = options.manifest or beside / MANIFEST
    manifest = Manifest.read(path)
    digest = sha256_of(path)
    say(f"{manifest.name}: {len(manifest.parts)} parts, {len(manifest.files)} packages; manifest {digest}")
    if options.expect and options.expect.lower() != digest:
        raise BundleError(f"{path} is not the manifest that --expect names", DAMAGED)
    folder = Path(os.path.abspath(options.into))
    host = check_host(manifest, options.python)
    files = Installed(folder).lacks(manifest.files)
    if not files:
        say(f"installed already: {folder}/bin/tailrace")
        return
    check_room(sum(file.size + file.unpacked for file in files), folder)
    parts = folder.with_name(f"{folder.name}.parts")
    staging = Staging(parts, manifest, files)
    collect(options.places or [beside], manifest, staging, say)
    if missing := staging.missing:
        names = ", ".join(part.name for part in missing)
        raise BundleError(f"still missing, bring them in any order: {names}", INCOMPLETE)
    verified(files, staging)
    say("every file is correct; installing")
    interpreter = make_environment(folder, options.python, host.values(), manifest.environment)
    install(manifest, files, staging, interpreter, say)
    failed = imports_of(manifest, interpreter)
    if not options.keep_parts:
        shutil.rmtree(parts)
    for line in failed:
        say(f"installed, but cannot be imported here: {line}")
    if failed:
        raise BundleError(f"{len(failed)} of {len(manifest.checks)} modules cannot be imported")
    say(f"ready: {folder}/bin/tailrace")


def main() -> int:
    """Return the exit status: 0 installed, 1 damaged or failed, 2 not for this host, 3 parts missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "places", type=Path, nargs="*", metavar="FILE_OR_FOLDER", help="parts, or folders of them"
    )
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="the environment to make")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make it with (this one)")
    parser.add_argument("--manifest", type=Path, help=f"{MANIFEST} (the one beside this script)")
    parser.add_argument("--expect", metavar="SHA256", help="hash that the manifest must have")
    parser.add_argument("--keep-parts", action="store_true", help="leave FOLDER.parts when done")
    try:
        run(parser.parse_args())
    except BundleError as error:
        print(f"install_bundle: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
