"""Find policies by name. A user's package adds one with the entry point group `tailrace.policies`."""

from __future__ import annotations

from importlib.metadata import entry_points

from tailrace.policy.base import Policy

GROUP = "tailrace.policies"


class UnknownPolicyError(ValueError):
    """No policy of that name is installed."""


def names() -> list[str]:
    """Names of all installed policies, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(name: str) -> Policy:
    """An instance of the policy called `name`.

    Raises UnknownPolicyError with the known names, or TypeError when the entry point is not a Policy.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            policy = point.load()()
            if not isinstance(policy, Policy):
                raise TypeError(f"policy {name!r} ({point.value}) is not a tailrace.policy.base.Policy")
            return policy
    raise UnknownPolicyError(f"unknown policy {name!r}; installed: {', '.join(names())}")
