"""From prefill to decode (section 3): which instances do which, and which decode instance gets a request.

All systems that the paper compares dispatch by "prefill-decode real-time KV cache load balancing (serving as
the common foundation)" (section 6.1), and so do all policies here. Section 3 has a request go "to a decode
instance according to its input length, predicted output length, and the current load of each", but not how:
the parameter `dispatch=variance` takes the choice that leaves the least time-weighted variance (equation 4),
among those with the memory of line 21.

Whether the view's pools are used is up to the cluster. An instance in no pool does both kinds of work; one
that Arrow is turning into a prefill instance gets no more decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tailrace.cluster import ClusterView, InstanceView, Phase, Pool, RequestState, RequestView

_NO_DECODE = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
_NO_PREFILL = (Pool.DECODE, Pool.PREFILL_TO_DECODE)


def decoders(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Those that decode: the paper's set I."""
    return [i for i in instances if i.pool is None or i.pool not in _NO_DECODE]


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Those that prefill, if some of them do nothing else. Empty: a request decodes where it is prefilled."""
    able = [i for i in instances if i.pool is None or i.pool not in _NO_PREFILL] or list(instances)
    pools = [i.pool for i in able if i.pool is not None]
    return able if any(pool in _NO_DECODE for pool in pools) else []


def least_backlog(instances: Sequence[InstanceView], held: Callable[[InstanceView], int]) -> InstanceView:
    """The prefill instance that is done first, which the paper leaves open; then fewest requests. `held`:
    tokens that need not be computed there."""
    return min(instances, key=lambda i: (i.prefill_backlog_tokens - held(i), i.load))


def hands_over(source: InstanceView, request: RequestView) -> bool:
    """Whether the request must leave to decode."""
    return source.pool in _NO_DECODE and not request.migrating


def waiting_to_leave(view: ClusterView) -> Iterator[tuple[InstanceView, RequestView]]:
    """Requests that decode on prefill instances, since no decode instance had room when they were ready."""
    for source in view.placeable():
        if source.pool is not Pool.PREFILL:
            continue
        for request in source.requests:
            if request.phase is not Phase.PREFILL and request.state is RequestState.RUNNING:
                yield source, request
