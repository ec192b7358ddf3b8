"""The Cache service over gRPC: what a worker's prefix cache holds."""

from __future__ import annotations

import grpc

from tailrace.cache.book import CacheBook
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.cache_messages import listing_of


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """One worker's."""

    def __init__(self, incarnation: str, book: CacheBook | None) -> None:
        """`book` None: the engine keeps no prefixes, or does not tell of them."""
        self._incarnation = incarnation
        self._book = book

    async def ListBlocks(
        self,
        request: cache_pb2.ListCacheRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListCacheRequest, cache_pb2.ListCacheReply],
    ) -> cache_pb2.ListCacheReply:
        """All that is held."""
        return listing_of(self._book, self._incarnation)
