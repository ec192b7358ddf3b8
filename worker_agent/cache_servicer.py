"""The gRPC Cache service: list the blocks in a worker's prefix cache, lend them, and copy prefixes into
it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from tailrace.cache.book import CacheBook
from tailrace.cache.follow import Change
from tailrace.cache.index import Tier
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.engine.base import Engine
from worker_agent.engine.errors import EngineRefusal
from worker_agent.prefixes import LOAN_MAX_S, Copies, LoanRefused, Loans
from worker_agent.registration import Addressee

_TIERS: Final = {Tier.DEVICE: cache_pb2.CACHE_TIER_DEVICE, Tier.HOST: cache_pb2.CACHE_TIER_HOST}


def update_of(book: CacheBook) -> cache_pb2.CacheUpdate:
    """Return the changes since the last update and mark them as reported."""
    seq, changes = book.take()
    return cache_pb2.CacheUpdate(seq=seq, changes=_messages(changes))


def _messages(changes: Sequence[Change]) -> list[cache_pb2.CacheChange]:
    return [
        cache_pb2.CacheChange(tier=_TIERS[change.tier], stored=change.stored, removed=change.removed)
        for change in changes
    ]


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Implement the Cache service of one worker."""

    def __init__(
        self, own: Addressee, book: CacheBook | None, engine: Engine, loans: Loans, copies: Copies
    ) -> None:
        """`book` None: the engine caches no prefixes, or does not report them."""
        self._engine = engine
        self._loans = loans
        self._copies = copies
        self._own = own
        self._book = book

    async def ListBlocks(
        self,
        request: cache_pb2.ListCacheRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListCacheRequest, cache_pb2.ListCacheReply],
    ) -> cache_pb2.ListCacheReply:
        """List all cached blocks."""
        seq, held = (0, []) if self._book is None else self._book.snapshot()
        return cache_pb2.ListCacheReply(incarnation=self._own.incarnation, seq=seq, held=_messages(held))

    async def Lend(  # type: ignore[override]
        self,
        request: cache_pb2.LendRequest,
        context: grpc.aio.ServicerContext[cache_pb2.LendRequest, cache_pb2.Lent],
    ) -> None:
        """Lend blocks to another worker until it ends the call."""
        left_s = context.time_remaining()
        lent_s = LOAN_MAX_S if left_s is None else min(left_s, LOAN_MAX_S)
        try:
            async with asyncio.timeout(lent_s), self._loans.lend(request) as lent:
                await context.write(lent)
                await asyncio.Event().wait()
        except LoanRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"lent for {lent_s:g} s")

    async def Prompt(
        self,
        request: cache_pb2.PromptRequest,
        context: grpc.aio.ServicerContext[cache_pb2.PromptRequest, cache_pb2.PromptReply],
    ) -> cache_pb2.PromptReply:
        """Return a request as it was submitted."""
        try:
            return cache_pb2.PromptReply(frames=await self._engine.submitted(request.request_id))
        except EngineRefusal as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    async def Copy(
        self,
        request: cache_pb2.CopyRequest,
        context: grpc.aio.ServicerContext[cache_pb2.CopyRequest, cache_pb2.CopyReply],
    ) -> cache_pb2.CopyReply:
        """Copy a prefix into this worker's cache; cancelled when the caller disconnects."""
        if refusal := self._own.refusal(request.target_instance_id):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        outcome = await self._copies.copy(request)
        return cache_pb2.CopyReply(outcome=outcome.result, blocks=outcome.blocks)
