"""What a bundle is made for: an engine, a Python, a processor, and what the host already has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# glibc versions that manylinux wheels are named after, newest first: pip matches each name exactly.
_GLIBC: Final = range(39, 16, -1)
_LEGACY: Final = ("manylinux2014", "manylinux2010", "manylinux1")


class Engine(StrEnum):
    """Which build of vLLM a worker runs."""

    CPU = "cpu"
    GPU = "gpu"


class Torch(StrEnum):
    """Where torch, Triton and their CUDA libraries come from: the bundle, or the host's own Python."""

    BUNDLE = "bundle"
    HOST = "host"


class Contents(StrEnum):
    """How much of vLLM's GPU build a bundle carries. The CPU build is always carried in full.

    vLLM's Triton kernels, which are compiled on the host, are in each. vLLM does not import on a GPU without
    one of the FlashAttention kernels, whatever it then uses: so the smallest bundles have one.
    """

    HOPPER = "hopper"  # with FlashAttention 3, vLLM's choice on H100 and H200
    AMPERE = "ampere"  # with FlashAttention 2, vLLM's choice on A100, L40S, RTX 30 and 40
    FULL = "full"  # everything


@dataclass(frozen=True)
class Target:
    """One kind of host. `python` is `3.12`, say; `machine` is as `uname -m` prints it."""

    engine: Engine
    python: str
    contents: Contents = Contents.FULL
    torch: Torch = Torch.BUNDLE
    machine: str = "x86_64"

    @property
    def name(self) -> str:
        """Name of the bundle's folder and the beginning of its parts' names."""
        parts = ["tailrace", str(self.engine)]
        if self.engine is Engine.GPU:
            parts.append(str(self.contents))
        parts += [f"py{self.python}", self.machine]
        if self.torch is Torch.HOST:
            parts.append("host-torch")
        return "-".join(parts)

    def markers(self) -> dict[str, str]:
        """Environment in which a lock file's markers are read (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def pip_options(self) -> list[str]:
        """Options that make pip choose wheels of this target, whatever it runs on."""
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in _GLIBC]
        platforms += [f"{name}_{self.machine}" for name in _LEGACY] + [f"linux_{self.machine}"]
        options = ["--implementation", "cp", "--python-version", self.python]
        for platform in platforms:
            options += ["--platform", platform]
        return options


def running_python() -> str:
    """Version of the Python that runs this, as Target has it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
