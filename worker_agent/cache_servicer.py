"""The Cache service over gRPC: what a worker's prefix cache holds, and who may copy it."""

from __future__ import annotations

import asyncio

import grpc

from tailrace.cache.book import CacheBook
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.cache_messages import listing_of
from worker_agent.prefixes.loans import LOAN_S, LoanRefused, Loans


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """One worker's."""

    def __init__(self, incarnation: str, book: CacheBook | None, loans: Loans) -> None:
        """`book` None: the engine keeps no prefixes, or does not tell of them."""
        self._loans = loans
        self._incarnation = incarnation
        self._book = book

    async def ListBlocks(
        self,
        request: cache_pb2.ListCacheRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListCacheRequest, cache_pb2.ListCacheReply],
    ) -> cache_pb2.ListCacheReply:
        """All that is held."""
        return listing_of(self._book, self._incarnation)

    async def Lend(  # type: ignore[override]
        self,
        request: cache_pb2.LendRequest,
        context: grpc.aio.ServicerContext[cache_pb2.LendRequest, cache_pb2.Lent],
    ) -> None:
        """Blocks for another worker; who has copied them hangs up."""
        try:
            async with asyncio.timeout(LOAN_S), self._loans.lend(request) as lent:
                await context.write(lent)
                await asyncio.Event().wait()
        except LoanRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"lent for {LOAN_S:g} s")
