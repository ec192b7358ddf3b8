"""Find policies by name. A user's package adds one with the entry point group `tailrace.policies`."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from tailrace.policy.base import Policy

GROUP = "tailrace.policies"


class UnknownPolicyError(ValueError):
    """No policy of that name is installed."""


class UnusablePolicyError(RuntimeError):
    """A policy of that name is installed, and cannot be made; the message says why."""


def names() -> list[str]:
    """Names of all installed policies, sorted."""
    return sorted(_points())


def load(name: str) -> Policy:
    """An instance of the policy called `name`.

    Raises UnknownPolicyError with the known names, UnusablePolicyError when its package fails.
    """
    if name not in _points():
        # Perhaps it has been installed since.
        _points.cache_clear()
    point = _points().get(name)
    if point is None:
        raise UnknownPolicyError(f"unknown policy {name!r}; installed: {', '.join(names())}")
    try:
        policy = point.load()()
    # Somebody else's package, which may fail in any way; a scheduler must outlive that.
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UnusablePolicyError(f"policy {name!r} ({point.value}) cannot be loaded: {said}") from error
    if not isinstance(policy, Policy):
        raise UnusablePolicyError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")
    return policy


@lru_cache(maxsize=1)
def _points() -> dict[str, EntryPoint]:
    """Looking for them takes tens of milliseconds: longer than a scheduler may stand still."""
    return {point.name: point for point in entry_points(group=GROUP)}
