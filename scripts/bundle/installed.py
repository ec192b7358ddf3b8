"""The CPU build's packages: those that `make install` chose on this machine.

There is no lock of them, since the CPU build pins a torch that is not on PyPI.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.bundle.pins import Pin

# Removed by scripts/install.sh, for the reason that is given there.
NOT_FOR_CPU: Final = {
    "torchvision": "PyPI's builds need CUDA; vLLM's text path does without",
    "torchaudio": "PyPI's builds need CUDA; vLLM's text path does without",
    "torchcodec": "PyPI's builds need CUDA; vLLM's text path does without",
}


class NotInstalled(LookupError):
    """A package that the CPU build needs is not in this environment."""


def wanted(pyproject: Path, extra: str) -> list[str]:
    """Requirements of the project with one of its extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


def installed_pins(
    requirements: Iterable[str], find: Callable[[str], tuple[str, list[str]]] | None = None
) -> list[Pin]:
    """Pins of all that `requirements` lead to, at the versions in this environment, by name.

    `find` returns a package's version and requirements, and raises PackageNotFoundError. Raise NotInstalled.
    """
    look = find or _find
    found: dict[str, Pin] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in NOT_FOR_CPU:
            continue
        extras = {"", *requirement.extras}
        if all((name, extra) in seen for extra in extras):
            continue
        try:
            version, further = look(name)
        except PackageNotFoundError as error:
            raise NotInstalled(f"{name} is not installed here: run `make install` first") from error
        found[name] = Pin(name, version)
        for extra in extras - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            waiting += _applying(further, extra)
    return [found[name] for name in sorted(found)]


def _applying(texts: Iterable[str], extra: str) -> Iterator[Requirement]:
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _find(name: str) -> tuple[str, list[str]]:
    found = distribution(name)
    return found.version, list(found.requires or [])
