"""ARES's dispatch from prefill to decode (section 3): which instances prefill, and which decode.

All systems that the paper compares dispatch by "prefill-decode real-time KV cache load balancing (serving as
the common foundation)" (section 6.1), and so do all policies here. Section 3 dispatches a request "to a
decode instance according to its input length, predicted output length, and the current load of each" without
saying how: with `dispatch=variance` the policy minimizes the time-weighted variance (equation 4) over the
instances that satisfy line 21.

Pools are used if the cluster has them. An instance in no pool does both kinds of work; a D->P instance gets
no more decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tailrace.cluster import (
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
)
from tailrace.policy.columns import Columns, PerInstances, smallest
from tailrace.policy.requests import Mask

_NO_DECODE = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
_NO_PREFILL = (Pool.DECODE, Pool.PREFILL_TO_DECODE)


def decoders(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances that decode: the paper's set I."""
    return [i for i in instances if i.pool is None or i.pool not in _NO_DECODE]


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances that prefill if some of them do nothing else; else none, and requests decode where
    they are prefilled."""
    able = [i for i in instances if i.pool is None or i.pool not in _NO_PREFILL] or list(instances)
    pools = [i.pool for i in able if i.pool is not None]
    return able if any(pool in _NO_DECODE for pool in pools) else []


def least_backlog(instances: Sequence[InstanceView], held: Callable[[InstanceView], int]) -> InstanceView:
    """Return the prefill instance with the least backlog, then the fewest requests (the paper names no rule).

    `held`: function from an instance to the arrival's cached tokens there.
    """
    return min(instances, key=lambda i: (i.prefill_backlog_tokens - held(i), i.load))


def kv_load(instance: InstanceView) -> int:
    """Return the KV load in tokens, used and queued."""
    return instance.kv_used_tokens + instance.prefill_backlog_tokens


class LeastKvLoad:
    """Select the decode instance with the least KV load that has room for a request, by column."""

    def __init__(self) -> None:
        self._columns = PerInstances(lambda: Columns(_read, 4))

    def for_request(self, view: ClusterView, request: RequestView) -> InstanceView | None:
        """Return the instance, the first by id of equals; None: none but the request's own has room."""
        columns = self._columns.of(view)
        load, free, longest, block = columns.update(view)
        tokens = request.context_tokens
        # As `candidates.fits_device`.
        fits: Mask = (np.ceil(tokens / block) + 1.0) * block <= free
        fits &= tokens < longest
        source = columns.seen.at.get(request.instance_id)
        if source is not None:
            fits[source] = False
        return columns.seen.views[smallest(load, fits)] if fits.any() else None


def _read(instance: InstanceView) -> tuple[float, ...]:
    able = instance.state is InstanceState.ACTIVE and instance.pool not in _NO_DECODE
    return (
        kv_load(instance),
        instance.kv_free_tokens if able else -1,
        instance.max_model_len if instance.max_model_len > 0 else math.inf,
        max(1, instance.block_tokens),
    )


def must_hand_over(source: InstanceView, request: RequestView) -> bool:
    """Return whether the request must leave its instance to decode."""
    return source.pool in _NO_DECODE and not request.migrating


def waiting_to_leave(view: ClusterView) -> Iterator[tuple[InstanceView, RequestView]]:
    """Yield requests that decode on prefill instances because no decode instance had room for them."""
    for source in view.placeable():
        if source.pool is not Pool.PREFILL:
            continue
        for request in source.requests:
            if request.phase is not Phase.PREFILL and request.state is RequestState.RUNNING:
                yield source, request
