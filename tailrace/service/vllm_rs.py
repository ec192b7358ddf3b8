"""Find vLLM's Rust API server, `vllm-rs`, or take it out of the wheel of the pinned version of vLLM.

The executable needs glibc alone, so it runs without vLLM, and beside vLLM's CPU build, whose wheel lacks it.
`python -m tailrace.service.vllm_rs` puts it next to this Python.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final
from urllib.parse import urljoin

from tailrace.json_value import JsonValue

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

NAME: Final = "vllm-rs"
PATH_VARIABLE: Final = "VLLM_RUST_FRONTEND_PATH"
"""vLLM's own variable with the path of the executable."""
SHA256: Final[Mapping[str, Mapping[str, str]]] = {
    "0.32.0": {
        "x86_64": "6f2bb3c5b4dc03cab615c8985971247f016c7113b7e5010da447eb633800dfa5",
        "aarch64": "259d554fa892733414f16373f27124ddd549605f128dbdaa2370b5665d885417",
    }
}
"""Of the executable in PyPI's wheels, by version of vLLM and machine. `fetch` says that of any other."""
_MEMBER: Final = "vllm/vllm-rs"
_TIMEOUT_S: Final = 60.0
_PIP_TIMEOUT_S: Final = 1_800.0
# Bytes of a part of the wheel that are read at once. The executable takes 19 MB of it.
_PART_BYTES: Final = 8 << 20
_PYPI: Final = "https://pypi.org/simple"
_INDEX_JSON: Final = "application/vnd.pypi.simple.v1+json"
_MAX_INDEX_BYTES: Final = 64 << 20


class NotFetched(RuntimeError):
    """The executable could not be fetched; the message says why."""


def find() -> Path | None:
    """Return the executable: from VLLM_RUST_FRONTEND_PATH, next to this Python, in vLLM's package (of its GPU
    build), or on PATH; None: nowhere."""
    named = os.environ.get(PATH_VARIABLE)
    candidates = [named] if named else [str(beside_python()), str(_packaged()), shutil.which(NAME)]
    return next((Path(path).absolute() for path in candidates if path and Path(path).is_file()), None)


def refusal(executable: Path, arguments: Mapping[str, JsonValue]) -> str:
    """Return why it refuses these arguments of `vllm serve`; empty if it takes them. Raise OSError.

    Its own parser says so: the number that is none keeps it from going on.
    """
    given = json.dumps({"model_tag": "any", **arguments})
    said = _said(executable, "--args-json", given, "--engine-count", "none")
    flags = [f"--{name.replace('_', '-')}" for name in re.findall(r"^- (\w+)$", said, re.MULTILINE)]
    if flags:
        return f"{', '.join(flags)}: not supported by vllm-rs; use --front python"
    return "" if "--args-json" not in said else said.strip().splitlines()[0]


def model_problem(executable: Path, folder: Path) -> str:
    """Return why it cannot serve the model of this folder; empty if it can. Raise OSError."""
    # It reads the tokenizer before it finds that it has no sockets.
    sockets = ("--listen-fd", "--input-listener-fd", "--output-listener-fd")
    numbers = [word for number, flag in enumerate(sockets, 1_000) for word in (flag, str(number))]
    said = _said(executable, *numbers, "--args-json", json.dumps({"model_tag": str(folder)}))
    if "failed to create" not in said:
        return ""
    _, _, cause = said.partition("Caused by:")
    return (cause.strip() or said.strip()).splitlines()[0].strip()


def _said(executable: Path, *arguments: str) -> str:
    command = [str(executable), "frontend", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{executable} did not end within {_TIMEOUT_S:g} s") from error
    return done.stdout + done.stderr


def beside_python() -> Path:
    """Return where `fetch` puts it by default."""
    return Path(sysconfig.get_path("scripts")) / NAME


def _packaged() -> Path:
    """Return where vLLM's GPU build has its own copy."""
    return Path(sysconfig.get_path("purelib")) / _MEMBER


def fetch(target: Path, say: Callable[[str], None]) -> None:
    """Put the executable at `target`; `say` is told what is downloaded. Raise NotFetched.

    Where vLLM's GPU build is installed, its own copy is linked and nothing is downloaded. An index that
    serves parts of files is asked for the executable alone, another one for the whole wheel (326 MB).
    """
    installed = _packaged()
    try:
        if installed.exists():
            target.unlink(missing_ok=True)
            target.symlink_to(installed)
            return
        requirement = f"vllm=={pinned_version()}"
        say(f"downloading {NAME}, vLLM's Rust API server, from the wheel of {requirement} (19 MB)")
        try:
            with io.BufferedReader(_Parts(_address_of(requirement)), _PART_BYTES) as wheel:
                _extract(wheel, target)
        except (OSError, LookupError, ValueError, zipfile.BadZipFile) as error:
            say(f"not alone ({error}): downloading the whole wheel (326 MB)")
            # Beside the target: the wheel is large, and /tmp may be memory.
            with (
                tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=f"{NAME}-") as folder,
                _download(requirement, Path(folder)).open("rb") as wheel,
            ):
                _extract(wheel, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise NotFetched(f"{NAME} cannot be put at {target}: {error}") from error


def pinned_version() -> str:
    """Return the version of vLLM that this version of Tailrace is for."""
    pins = (re.match(r"vllm==([^\s;]+)", requirement) for requirement in requires("tailrace") or ())
    return next(pin[1] for pin in pins if pin)


def _address_of(requirement: str) -> str:
    """Return the address of the wheel for this machine; ValueError if the index does not tell in JSON."""
    settings = _pip("config", "list")
    # In the order in which a later one counts.
    indices = re.findall(r"^(?:global|:env:)\.index-url='(.+)'$", settings, re.MULTILINE)
    project = f"{(indices or [_PYPI])[-1].rstrip('/')}/vllm/"
    request = urllib.request.Request(project, headers={"Accept": _INDEX_JSON})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        files = json.loads(response.read(_MAX_INDEX_BYTES))["files"]
    name = re.compile(rf"{requirement.replace('==', '-')}-.*{platform.machine()}\.whl")
    for file in files:
        if name.fullmatch(file["filename"]):
            address: str = urljoin(project, file["url"])
            return address
    raise ValueError(f"{project} has no wheel for {platform.machine()}")


def _download(requirement: str, folder: Path) -> Path:
    only = ("--quiet", "--no-deps", "--only-binary", ":all:")
    _pip("download", *only, "--dest", str(folder), requirement)
    return next(folder.glob("vllm-*.whl"))


def _pip(verb: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", verb, "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"{NAME}: pip {verb} did not end within {_PIP_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip() or "it did not say why").splitlines()[-1]
        raise NotFetched(
            f"pip cannot find the wheel with {NAME}, which exists for Linux on x86-64 and aarch64: {reason}"
        )
    return done.stdout


def _extract(wheel: IO[bytes], target: Path) -> None:
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        if _MEMBER not in archive.namelist():
            raise NotFetched(f"the wheel of vLLM carries no {_MEMBER}")
        with archive.open(_MEMBER) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    with partial.open("rb") as copy:
        found = hashlib.file_digest(copy, "sha256").hexdigest()
    version, machine = pinned_version(), platform.machine()
    if found != (known := SHA256.get(version, {}).get(machine, "(none is known)")):
        partial.unlink()
        raise NotFetched(
            f"{NAME} of vLLM {version} for {machine} has the SHA-256 {found}, not {known}; "
            f"{PATH_VARIABLE} may name one that you trust"
        )
    partial.chmod(0o755)
    partial.replace(target)


class _Parts(io.RawIOBase):
    """A file on a web server, of which only what is read is transferred."""

    def __init__(self, address: str) -> None:
        """Raise OSError, or ValueError if the server cannot serve parts."""
        self._address = address
        self._at = 0
        self._size = self._request("bytes=-1")[1]

    def _request(self, wanted: str) -> tuple[bytes, int]:
        """Return this range's bytes, and the file's size."""
        request = urllib.request.Request(self._address, headers={"Range": wanted})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            size = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
            if size is None:
                raise ValueError("the index serves whole files alone")
            return response.read(), int(size[1])

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See io.RawIOBase."""
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See io.RawIOBase."""
        view = memoryview(buffer)
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        part, _ = self._request(f"bytes={self._at}-{end - 1}")
        view[: len(part)] = part
        self._at += len(part)
        return len(part)


def main() -> None:
    """Fetch the executable. The one argument, which can be left out, is where to put it."""
    target = Path(sys.argv[1]).absolute() if sys.argv[1:] else beside_python()
    try:
        fetch(target, lambda text: print(text, flush=True))
    except NotFetched as error:
        sys.exit(str(error))
    print(f"{target}: {target.stat().st_size // 1_000_000} MB")


if __name__ == "__main__":
    main()
