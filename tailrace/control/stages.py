"""Where a request outgrows the stage of its instance."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import Stage


def length_bounds(stages: Sequence[Stage]) -> dict[str, int]:
    """By instance, the context in tokens from which a request on it has outgrown its stage: the end of the
    longest stage that the instance serves."""
    ends: dict[str, int] = {}
    for stage in stages:
        for name in stage.instance_ids:
            ends[name] = max(stage.hi, ends.get(name, 0))
    return ends
