"""Group models by weights, ignoring precision. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.model_identity import covers


@dataclass(frozen=True, slots=True)
class SameWeights:
    """Keys of models that differ at most in precision.

    `short` (`text:weights`) covers all precisions of these weights, whatever `keys` are known. A key without
    a precision, as a front end has, is one of `keys` as well.
    """

    short: str
    keys: frozenset[str]

    @property
    def key(self) -> str:
        """Return the key that covers them: the exact one if there is only one, else the short one."""
        return next(iter(self.keys)) if len(self.keys) == 1 else self.short

    def includes(self, key: str) -> bool:
        """Return whether the model of this key has these weights."""
        return covers(self.short, key)

    def without(self, key: str) -> SameWeights:
        """Return the group without `key`, or the same group if that is its only key."""
        return SameWeights(self.short, self.keys - {key} or self.keys)


def group_by_weights(keys: Iterable[str]) -> list[SameWeights]:
    """Return one group for each set of weights, in key order."""
    groups: dict[str, set[str]] = {}
    for key in keys:
        groups.setdefault(":".join(key.split(":")[:2]), set()).add(key)
    return [SameWeights(short, frozenset(groups[short])) for short in sorted(groups)]
