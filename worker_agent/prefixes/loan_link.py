"""The borrower's side of a loan: one Lend call to the holder of a prefix."""

from __future__ import annotations

import asyncio

import grpc

from tailrace.service.channels import format_error
from tailrace.v1 import cache_pb2, cache_pb2_grpc


class LoanLost(Exception):
    """The holder refused or ended the loan, or is lost; the message says why."""


class LoanLink:
    """One loan, from the borrower's side."""

    def __init__(self, channel: grpc.aio.Channel, request: cache_pb2.LendRequest, timeout_s: float) -> None:
        """`timeout_s`: deadline of the whole loan, in seconds."""
        self._call = cache_pb2_grpc.CacheStub(channel).Lend(request, timeout=timeout_s)

    async def open(self) -> cache_pb2.Lent:
        """Return what is lent; it is valid until the link is closed. Raise LoanLost."""
        try:
            lent = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LoanLost(format_error(error)) from error
        if not isinstance(lent, cache_pb2.Lent):
            raise LoanLost("the holder closed the loan")
        return lent

    def close(self) -> None:
        """End the loan; the blocks must not be read any more. Idempotent."""
        self._call.cancel()
