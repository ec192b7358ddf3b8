"""Packages with exact versions: what a bundle is made of, before anything is downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.bundle.target import Target


@dataclass(frozen=True)
class Pin:
    """One package at one version; with `hashes` (`sha256:...`), pip takes no file that has another."""

    name: str
    version: str
    hashes: tuple[str, ...] = field(default=(), compare=False)

    def line(self) -> str:
        """As a line of a requirements file."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash={value}" for value in self.hashes)])


class LockError(ValueError):
    """A lock file says something that a bundle cannot follow."""


def locked(lock: Path, target: Target) -> list[Pin]:
    """Pins of a lock file (`scripts/lock.sh`) for `target`, in the file's order. Raise LockError."""
    pins: dict[str, Pin] = {}
    for entry in lock.read_text().replace("\\\n", " ").splitlines():
        if not entry.strip() or entry.startswith("#"):
            continue
        text, *hashes = re.split(r"\s+--hash=", entry.strip())
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate(target.markers()):
            continue
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==":
            raise LockError(f"{lock.name}: {text} does not pin one version")
        name = canonicalize_name(requirement.name)
        if name in pins:
            raise LockError(f"{lock.name}: {name} has two versions for {target.name}")
        pins[name] = Pin(name, specifiers[0].version, tuple(hashes))
    return list(pins.values())
