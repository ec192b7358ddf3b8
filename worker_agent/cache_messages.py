"""What a prefix cache holds, in the monitor's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tailrace.cache.book import CacheBook
from tailrace.cache.follow import Change
from tailrace.cache.tiers import Tier
from tailrace.v1 import cache_pb2

_TIERS: Final = {Tier.DEVICE: cache_pb2.CACHE_TIER_DEVICE, Tier.HOST: cache_pb2.CACHE_TIER_HOST}


def update_of(book: CacheBook) -> cache_pb2.CacheUpdate:
    """What is to be told next; it counts as told from now on."""
    seq, changes = book.take()
    return cache_pb2.CacheUpdate(seq=seq, changes=_messages(changes))


def listing_of(book: CacheBook | None, incarnation: str) -> cache_pb2.ListCacheReply:
    """All that is held; None: nothing ever is."""
    seq, held = (0, []) if book is None else book.snapshot()
    return cache_pb2.ListCacheReply(incarnation=incarnation, seq=seq, held=_messages(held))


def _messages(changes: Sequence[Change]) -> list[cache_pb2.CacheChange]:
    return [
        cache_pb2.CacheChange(tier=_TIERS[change.tier], stored=change.stored, removed=change.removed)
        for change in changes
    ]
