"""Models of the same weights, and the one key that stands for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.model_identity import covers


@dataclass(frozen=True, slots=True)
class SameWeights:
    """Keys of models that differ at most in precision.

    `short` (`text:weights`) stands for all precisions of these weights, whatever `keys` are known. A key that
    does not tell its precision, as a front end's, is one of `keys`, too.
    """

    short: str
    keys: frozenset[str]

    @property
    def key(self) -> str:
        """The one key that stands for them: exact where there is one alone, else short."""
        return next(iter(self.keys)) if len(self.keys) == 1 else self.short

    def include(self, key: str) -> bool:
        """Whether the model of this key has these weights."""
        return covers(self.short, key)

    def without(self, key: str) -> SameWeights:
        """The others than that of `key`; the same where it is the only one."""
        return SameWeights(self.short, self.keys - {key} or self.keys)


def group_by_weights(keys: Iterable[str]) -> list[SameWeights]:
    """Each of the weights once, in key order."""
    found: dict[str, set[str]] = {}
    for key in keys:
        found.setdefault(":".join(key.split(":")[:2]), set()).add(key)
    return [SameWeights(short, frozenset(found[short])) for short in sorted(found)]
