"""Copies of prefixes that the scheduler orders in advance: pulls for which no request waits.

The holder sends the prompt of a request that begins with the prefix, and this engine computes the block names
itself, as for a pull. A copy has the lowest priority: one at a time, and none while users' pulls or incoming
migrations are in progress, or if there is no free room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import grpc

from tailrace.service.channels import decoded, format_error
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.engine.base import Frames, Pull, RequestKey, Submission
from worker_agent.metrics import WorkerMetrics
from worker_agent.prefixes.pulls import Outcome, Pulls

log = logging.getLogger(__name__)

# Deadline for fetching a prompt, in seconds.
_PROMPT_S: Final = 2.0
# The key of a copy's submission, which belongs to no front end and is never submitted to the engine.
_NO_CLIENT: Final = RequestKey(0, 0)


class PromptUnknown(Exception):
    """The holder has no such request, or is gone; the message says why."""


class PromptLink:
    """Fetches prompts from other workers."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel]) -> None:
        """`channel(address)`: returns a channel to a worker."""
        self._channel = channel

    async def prompt(self, address: str, request_id: str) -> Frames:
        """Return a request as it was submitted to that worker. Raise PromptUnknown."""
        stub = cache_pb2_grpc.CacheStub(self._channel(address))
        try:
            call = stub.Prompt(cache_pb2.PromptRequest(request_id=request_id), timeout=_PROMPT_S)
            reply = decoded(await call, address)
        except grpc.aio.AioRpcError as error:
            raise PromptUnknown(format_error(error)) from error
        return list(reply.frames)


class Copies:
    """The copies to this worker, at most one at a time."""

    def __init__(
        self, pulls: Pulls, prompts: PromptLink, importing: Callable[[], int], metrics: WorkerMetrics
    ) -> None:
        """`importing()`: returns the number of open migrations to this worker."""
        self._pulls = pulls
        self._prompts = prompts
        self._importing = importing
        self._metrics = metrics
        self._copying = False

    async def copy(self, request: cache_pb2.CopyRequest) -> Outcome:
        """Copy the prefix into the cache and return the outcome. Cancelling ends the copy."""
        if self._copying or len(self._pulls) or self._importing():
            outcome = Outcome("busy", reason="another copy, or KV that users wait for, is in transit")
        else:
            self._copying = True
            try:
                outcome = await self._bring(request)
            finally:
                self._copying = False
        self._metrics.copies[outcome.result] += 1
        if outcome.reason:
            log.info("no copy of a prefix from %s: %s", request.holder_instance_id, outcome.reason)
        return outcome

    async def _bring(self, request: cache_pb2.CopyRequest) -> Outcome:
        try:
            frames = await self._prompts.prompt(request.holder_address, request.request_id)
        except PromptUnknown as error:
            return Outcome("gone", reason=str(error))
        holder = Pull(request.holder_instance_id, request.holder_address, request.tokens)
        return await self._pulls.bring(Submission(_NO_CLIENT, request.request_id, 0, frames, pull=holder))
