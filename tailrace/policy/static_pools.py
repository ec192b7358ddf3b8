"""Static pools: prefill in one pool, decode in the other, never move an instance between them."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Migrate, Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool, RequestView
from tailrace.policy.base import Policy


class StaticPools(Policy):
    """Static PD disaggregation with minimal-load dispatch: Arrow's "Minimal Load" baseline (section 7.3).

    An instance in no pool does both kinds of work, so that a cluster without pools is usable.
    """

    batch_order = "decode_first"
    # 4P+4D (Arrow, section 7.3).
    prefill_share = 0.5
    summary = "prefill pool and decode pool of fixed membership, least loaded within each"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the prefill instance with the smallest backlog.

        That includes requests with output already delivered: their KV must be recomputed.
        """
        candidates = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        prefillers = [i for i in candidates if i.pool is not Pool.DECODE] or candidates
        return Place(min(prefillers, key=_prefill_key).instance_id)

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Hand over to the decode instance with the most free KV that has room for the whole context."""
        source = view.instances.get(request.instance_id)
        if source is None or source.pool is not Pool.PREFILL or request.migrating:
            return ()
        need = request.context_tokens + source.block_tokens
        decoders = [i for i in view.placeable() if i.pool is Pool.DECODE and i.kv_free_tokens >= need]
        if not decoders:
            return ()
        target = min(decoders, key=_decode_key)
        return (Migrate(request.request_id, source.instance_id, target.instance_id, "prefill done"),)


def _prefill_key(instance: InstanceView) -> tuple[int, int, str]:
    return (instance.prefill_backlog_tokens, instance.load, instance.instance_id)


def _decode_key(instance: InstanceView) -> tuple[int, int, str]:
    return (instance.kv_used_tokens, instance.load, instance.instance_id)
