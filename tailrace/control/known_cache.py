"""Which prefixes are cached where, according to the workers' reports, and how much of an arrival each
instance holds.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tailrace.cache.follow import CacheFollower, Change
from tailrace.cache.index import CacheIndex, Tier
from tailrace.cache.placed import PlacedPrefixes, cached_tokens
from tailrace.cluster import NOTHING_CACHED, CachedTokens
from tailrace.records import InstanceRecord
from tailrace.v1 import cache_pb2, monitor_pb2

_TIERS: Final = {cache_pb2.CACHE_TIER_DEVICE: Tier.DEVICE, cache_pb2.CACHE_TIER_HOST: Tier.HOST}


class KnownCache:
    """Maintain the cache index from reports."""

    def __init__(self) -> None:
        self.follower = CacheFollower(CacheIndex())
        self._placed = PlacedPrefixes()

    @property
    def index(self) -> CacheIndex:
        """Return the index."""
        return self.follower.index

    def set_instances(self, records: Mapping[str, InstanceRecord]) -> None:
        """Drop instances that are not members, or that restarted."""
        self.follower.keep({name: record.incarnation for name, record in records.items()})

    def apply(self, report: monitor_pb2.WorkerReport) -> None:
        """Apply a report's cache update."""
        if report.HasField("cache"):
            update = report.cache
            changes = read_changes(update.changes)
            self.follower.update(report.instance_id, report.incarnation, update.seq, changes)

    def listed(self, instance_id: str, reply: cache_pb2.ListCacheReply) -> None:
        """Apply a full listing of an instance's cache."""
        self.follower.snapshot(instance_id, reply.incarnation, reply.seq, read_changes(reply.held))

    def placed(self, instance_id: str, names: Sequence[int], now_s: float) -> None:
        """Record that a request that begins with these blocks was placed there."""
        self._placed.place(instance_id, names, now_s)

    @property
    def recent(self) -> list[tuple[float, str, Sequence[int]]]:
        """Return (time, instance, names) of the placements that count, oldest first."""
        return self._placed.placed

    def of_arrival(
        self, names: Sequence[int], block_tokens: int, prompt_tokens: int, now_s: float
    ) -> Mapping[str, CachedTokens]:
        """Return the tokens of a prompt with these blocks that each instance holds, without those that hold
        none.

        The last token of a prompt is always computed.
        """
        if not names or block_tokens < 1:
            return NOTHING_CACHED
        self._placed.forget(now_s)
        return cached_tokens(
            self.index.match(names), self._placed.index.match(names), block_tokens, max(0, prompt_tokens - 1)
        )


def read_changes(messages: Iterable[cache_pb2.CacheChange]) -> list[Change]:
    """Decode changes, ignoring unknown tiers."""
    return [
        Change(tier, message.stored, message.removed)
        for message in messages
        if (tier := _TIERS.get(message.tier)) is not None
    ]
