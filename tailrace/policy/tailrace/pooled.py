"""If pools are set: which instances may prefill, and which may decode (Arrow, sections 5.2 to 5.4).

Pools are an explicit decision to separate prefill from decode, so they take precedence over the cost model: a
request leaves a prefill instance to decode whether or not that pays. Arrow's own rules choose the members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tailrace.cluster import ClusterView, InstanceView, Pool

PREFILL_SIDE: Final = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
DECODE_SIDE: Final = (Pool.DECODE, Pool.PREFILL_TO_DECODE)


def pooled(view: ClusterView) -> bool:
    """Return whether any instance is in a pool."""
    return any(i.pool is not None for i in view.instances.values())


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances on the prefill side or in no pool; if there are none, all, since any instance can
    prefill."""
    return [i for i in instances if i.pool not in DECODE_SIDE] or list(instances)


def decodes(instance: InstanceView) -> bool:
    """Return whether the instance is on the decode side or in no pool."""
    return instance.pool not in PREFILL_SIDE


def decoders(instances: Iterable[InstanceView]) -> list[InstanceView]:
    """Return the instances on the decode side or in no pool."""
    return [i for i in instances if decodes(i)]
