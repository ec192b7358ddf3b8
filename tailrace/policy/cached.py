"""What the papers' policies can be told of the fleet's prefix caches; by the papers' letter they know
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.cluster import Arrival, InstanceView
from tailrace.policy.parameters import Parameter

CACHE_AWARE: Final = Parameter(
    "cache_aware",
    bool,
    False,
    "whether an arrival counts less, by as many tokens, on an instance that has the KV of its first tokens",
    source="false: the paper, which has no prefix cache; true: ours",
)


def credit(arrival: Arrival, cache_aware: bool) -> Callable[[InstanceView], int]:
    """Tokens that each instance already has of the arrival; none where they are not to count."""
    if not cache_aware or not arrival.cached:
        return _none
    return lambda instance: arrival.cached_tokens(instance.instance_id)


def _none(instance: InstanceView) -> int:
    return 0
