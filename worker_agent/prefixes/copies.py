"""Prefixes that the scheduler wants here before anybody asks for them: pulls that no request waits for.

The prompt of a request that the holder has says what is to come: this engine names its blocks for itself, as
for a pull. A copy gives way: one at a time, and none while users' pulls or migrations to here are under way,
or where the room is not free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import grpc

from tailrace.service.channels import format_error
from tailrace.v1 import cache_pb2, cache_pb2_grpc
from worker_agent.engine.base import Frames, Pull, RequestKey, Submission
from worker_agent.metrics import WorkerMetrics
from worker_agent.prefixes.pulls import Outcome, Pulls

log = logging.getLogger(__name__)

# To be told a prompt.
_PROMPT_S: Final = 2.0
# Of no front end: nothing of it ever reaches the engine's requests.
_NOBODY: Final = RequestKey(0, 0)


class PromptUnknown(Exception):
    """The holder has no such request, or is gone; the message says why."""


class PromptLink(Protocol):
    """How another worker is asked for a prompt."""

    async def prompt(self, address: str, request_id: str) -> Frames:
        """The request as it was submitted there. Raises PromptUnknown."""


class GrpcPromptLink:
    """PromptLink over gRPC."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel]) -> None:
        """`channel(address)`: to a worker."""
        self._channel = channel

    async def prompt(self, address: str, request_id: str) -> Frames:
        """PromptLink.prompt."""
        stub = cache_pb2_grpc.CacheStub(self._channel(address))
        try:
            reply = await stub.Prompt(cache_pb2.PromptRequest(request_id=request_id), timeout=_PROMPT_S)
        except grpc.aio.AioRpcError as error:
            raise PromptUnknown(format_error(error)) from error
        return list(reply.frames)


class Copies:
    """All of a worker: at most one at a time."""

    def __init__(
        self, pulls: Pulls, prompts: PromptLink, importing: Callable[[], int], metrics: WorkerMetrics
    ) -> None:
        """`importing()`: migrations to here that are open."""
        self._pulls = pulls
        self._prompts = prompts
        self._importing = importing
        self._metrics = metrics
        self._copying = False

    async def copy(self, request: cache_pb2.CopyRequest) -> Outcome:
        """Bring the prefix into the cache; how it ended. Whoever cancels it ends it."""
        if self._copying or len(self._pulls) or self._importing():
            outcome = Outcome("busy", reason="another copy, or KV that users wait for, is in transit")
        else:
            self._copying = True
            try:
                outcome = await self._bring(request)
            finally:
                self._copying = False
        self._metrics.copies[outcome.word] += 1
        if outcome.reason:
            log.info("no copy of a prefix from %s: %s", request.holder_instance_id, outcome.reason)
        return outcome

    async def _bring(self, request: cache_pb2.CopyRequest) -> Outcome:
        try:
            frames = await self._prompts.prompt(request.holder_address, request.request_id)
        except PromptUnknown as error:
            return Outcome("gone", reason=str(error))
        holder = Pull(request.holder_instance_id, request.holder_address, request.tokens)
        return await self._pulls.bring(Submission(_NOBODY, request.request_id, 0, frames, pull=holder))
