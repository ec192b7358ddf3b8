"""Choose the instance for a request: ask the scheduler, and fall back to a local choice while none
answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import msgspec

from frontend_svc.fleet import ModelFleet
from frontend_svc.links import Outbox
from frontend_svc.streams import Stream, StreamTable
from tailrace.cache.names import Naming, block_names
from tailrace.members import Members
from tailrace.model_identity import engine_name
from tailrace.request_ids import own_id
from tailrace.rollout.record import RolloutRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, format_error, preferred
from tailrace.service.reachability import Reachability
from tailrace.service.tasks import cancel, run_once
from tailrace.store.reading import UnreadableRecord, read_record
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from tailrace.wire.cache_keys import read_cache_keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prefix information sent to the scheduler: hashes of the request's blocks, never its tokens.

    `names` is empty if no instance names its blocks; each name stands for `block_tokens` tokens.
    """

    names: Sequence[int] = ()
    block_tokens: int = 0
    session_id: str = ""


def prefix_of(stream: Stream, naming: Naming | None) -> Prefix:
    """Return the prefix of the prompt and the tokens accepted so far."""
    read = read_cache_keys(stream.frames)
    if read is None:
        return Prefix()
    if naming is None:
        return Prefix(session_id=read.session_id)
    try:
        tokens = read.tokens()
    except msgspec.DecodeError:
        return Prefix(session_id=read.session_id)
    if stream.accepted:
        tokens = [*tokens, *stream.token_ids]
    keys = read.keys
    if keys.adapter is not None:
        name, path = keys.adapter
        keys = keys._replace(adapter=(engine_name(name, path, stream.adapter_version), path))
    return Prefix(block_names(tokens, naming, keys), naming.block_tokens, read.session_id)


# The scheduler may choose an instance that has just been lost; it is asked again up to this many times.
_ATTEMPTS: Final = 3
# Slower than any reader.
_PACE_MAX_S: Final = 60.0
FALLBACK_PLACEMENT: Final = "fallback"
"""Who placed a request if no scheduler did (`Chosen.by`)."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen instance. `by`: the scheduler's policy, or "fallback".

    `pull`: the instance to fetch the KV of the request's first tokens from; None to fetch from nowhere.
    `pace_s`: seconds per token at which the policy wants the answer shown; 0: as soon as it is made.
    """

    instance_id: str
    by: str
    pull: worker_pb2.Pull | None = None
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoneChosen:
    """No instance can take the request now. `final`: the request must not wait until one can."""

    reason: str
    final: bool = False


class InstanceChooser:
    """Ask a scheduler; while none answers, choose the attached instance with the fewest streams of this front
    end.

    A stream that already has tokens continues on the model that generated them, or not at all.
    """

    def __init__(
        self, frontend_id: str, fleet: ModelFleet, outbox: Outbox, table: StreamTable, channels: Channels
    ) -> None:
        self._frontend_id = frontend_id
        self._fleet = fleet
        self._outbox = outbox
        self._table = table
        self._calls = PlacementClient(fleet.members, channels)

    async def close(self) -> None:
        """Close the scheduler client."""
        await self._calls.close()

    def model_of(self, instance_id: str) -> str:
        """Return the key of the model that an instance runs; empty if unknown."""
        return self._fleet.model_of(instance_id)

    async def choose(self, stream: Stream, avoid: frozenset[str]) -> Chosen | NoneChosen:
        """Choose an instance for the stream that is attached now; `avoid` is never chosen. Takes a few
        seconds at most."""
        if not stream.accepted and self._fleet.rollout_error:
            return NoneChosen(self._fleet.rollout_error)
        unable, excluded = self._excluded(stream, avoid)
        prefix = prefix_of(stream, self._fleet.naming)
        for _ in range(_ATTEMPTS):
            reply = await self._ask(stream, excluded, prefix)
            if reply is None:
                return self._fallback(stream, avoid | unable)
            if self._learn_rollout(reply):
                # Instances of the new model are only now being connected to: the stream waits for one.
                unable, excluded = self._excluded(stream, avoid)
                continue
            if not reply.instance_id:
                return NoneChosen(reply.refusal or "the scheduler named no instance", reply.final)
            if self._may_take(reply.instance_id, stream):
                return Chosen(reply.instance_id, reply.policy, _pull(reply), _pace_s(reply))
            excluded.add(reply.instance_id)
        return self._fallback(stream, avoid | unable)

    async def ask_for_first(self) -> None:
        """Tell a scheduler that an instance is needed if there is none; nothing waits for it here."""
        if not self._fleet.instances:
            await self._calls.place(
                scheduler_pb2.PlaceRequest(
                    request_id=own_id("first-instance"),
                    frontend_id=self._frontend_id,
                    model=self._fleet.model,
                )
            )

    def last_resort(self, stream: Stream, avoid: frozenset[str]) -> Chosen | None:
        """Return an instance for a stream with tokens if `choose` found none: one that only a rollout drains.

        A rollout keeps new requests away from it, and this one is not new.
        """
        if not stream.accepted:
            return None
        model, never = self._model(stream), avoid | self._fleet.incapable(stream.requirements)
        leaving = self._fleet.leaving.intersection(self._outbox.attached()) - never
        candidates = [i for i in leaving if self._fleet.is_model(i, model)]
        return self._least_loaded(candidates) if candidates else None

    def _excluded(self, stream: Stream, avoid: frozenset[str]) -> tuple[frozenset[str], set[str]]:
        """Return instances unable to run the request, and all instances that it must not go to.

        The second set includes draining instances because the scheduler may not know of them yet.
        """
        unable = self._fleet.incapable(stream.requirements)
        return unable, {*avoid, *self._fleet.draining, *unable}

    async def _ask(
        self, stream: Stream, excluded: set[str], prefix: Prefix
    ) -> scheduler_pb2.PlaceReply | None:
        """Return a scheduler's reply, or None if none answers."""
        request = scheduler_pb2.PlaceRequest(
            request_id=stream.request_id,
            frontend_id=self._frontend_id,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.accepted,
            max_tokens=stream.max_tokens,
            excluded_instance_ids=sorted(excluded),
            traceparent=stream.traceparent,
            model=self._model(stream),
            block_names=prefix.names,
            block_tokens=prefix.block_tokens,
            session_id=prefix.session_id,
            admitted=stream.epoch > 0 or stream.accepted > 0,
            served_name="" if stream.accepted else self._fleet.public_name,
        )
        return await self._calls.place(request)

    def _learn_rollout(self, reply: scheduler_pb2.PlaceReply) -> bool:
        """Return whether the reply carries a rollout that was not known here, so that the scheduler must be
        asked again."""
        if not reply.rollout:
            return False
        try:
            rollout = read_record(RolloutRecord, reply.rollout)
        except UnreadableRecord as error:
            unreadable("rollout of a scheduler", "in a placement", error)
            return False
        return self._fleet.learn_rollout(rollout)

    def _model(self, stream: Stream) -> str:
        """Return the key of the model that may answer."""
        return stream.model if stream.accepted and stream.model else self._fleet.model

    def _may_take(self, instance_id: str, stream: Stream) -> bool:
        # `attached` lists all instances of the fleet.
        attached = self._outbox.max_message_bytes(instance_id) > 0
        return attached and self._fleet.is_model(instance_id, self._model(stream))

    def _fallback(self, stream: Stream, avoid: frozenset[str]) -> Chosen | NoneChosen:
        model = self._model(stream)
        of_model = [i for i in self._outbox.attached() if self._fleet.is_model(i, model)]
        candidates = [i for i in self._fleet.usable(of_model) if i not in avoid]
        if not candidates:
            return NoneChosen(
                "no instance of its model answers" if stream.accepted else "no instance answers"
            )
        return self._least_loaded(candidates)

    def _least_loaded(self, candidates: list[str]) -> Chosen:
        count = self._table.count_owned
        best = min(self._fleet.prefilling(candidates), key=lambda i: (count(i), i))
        return Chosen(best, FALLBACK_PLACEMENT)


def _pace_s(reply: scheduler_pb2.PlaceReply) -> float:
    # NaN is in no range.
    return reply.pace_s if 0.0 < reply.pace_s <= _PACE_MAX_S else 0.0


def _pull(reply: scheduler_pb2.PlaceReply) -> worker_pb2.Pull | None:
    if not reply.pull_address:
        return None
    return worker_pb2.Pull(
        instance_id=reply.pull_from_instance_id, address=reply.pull_address, tokens=reply.pull_tokens
    )


# Of a message and its reply.
_DEADLINE_S: Final = 1.0
# Requests per message. A scheduler decides on all of them before it does anything else, which takes some
# 50 ms for a full batch; smaller batches would make a burst of a thousand wait for many messages.
_BATCH_MAX: Final = 512

_PendingReply = asyncio.Future[scheduler_pb2.PlaceReply | None]


class PlacementClient:
    """Send placement requests to the schedulers, one message at a time; requests that arrive meanwhile share
    the next one.

    A message costs both ends time whatever it carries, which in a burst is most of the cost of placing.
    """

    def __init__(
        self, members: Members, channels: Channels, reachability: Reachability | None = None
    ) -> None:
        """Keep `reachability` (a new one by default) and close it with this client."""
        self._members = members
        self._channels = channels
        # A scheduler that did not answer is probed in the background, so that only one message waits for its
        # deadline.
        self._reachability = (
            reachability if reachability is not None else Reachability(channels, Role.SCHEDULER)
        )
        self._waiting: list[tuple[scheduler_pb2.PlaceRequest, _PendingReply]] = []
        self._task: asyncio.Task[None] | None = None
        # By address.
        self._streams: dict[str, _PlacementStream] = {}

    async def place(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply | None:
        """Return the reply of the first scheduler that answers, the leader first; None if none does."""
        pending: _PendingReply = asyncio.get_running_loop().create_future()
        self._waiting.append((request, pending))
        if self._task is None:
            self._task = run_once("placements", self._run)
        return await pending

    async def close(self) -> None:
        """Stop; requests that still wait get None."""
        if self._task is not None:
            await cancel(self._task)
        for address in list(self._streams):
            self._drop_stream(address)
        await self._reachability.close()

    async def _run(self) -> None:
        batch: list[tuple[scheduler_pb2.PlaceRequest, _PendingReply]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
                replies = await self._ask([request for request, _ in batch])
                for (_, pending), reply in zip(batch, replies, strict=True):
                    _resolve(pending, reply)
        finally:
            # No await between the last check of the queue and this: a request that arrives later starts a new
            # task.
            self._task = None
            for _, pending in (*batch, *self._waiting):
                _resolve(pending, None)
            self._waiting.clear()

    async def _ask(
        self, requests: list[scheduler_pb2.PlaceRequest]
    ) -> list[scheduler_pb2.PlaceReply] | list[None]:
        message = scheduler_pb2.PlaceManyRequest(requests=requests)
        for address in self._schedulers():
            try:
                reply = await self._ask_one(address, message)
            except (grpc.aio.AioRpcError, _StreamEnded, TimeoutError) as error:
                log.warning("scheduler at %s: %s", address, format_error(error))
            else:
                if len(reply.replies) == len(requests):
                    self._reachability.succeeded(address)
                    return list(reply.replies)
                log.error("scheduler at %s: %d replies to %d", address, len(reply.replies), len(requests))
            self._drop_stream(address)
            self._reachability.failed(address)
        return [None] * len(requests)

    async def _ask_one(
        self, address: str, message: scheduler_pb2.PlaceManyRequest
    ) -> scheduler_pb2.PlaceManyReply:
        """Return a scheduler's reply. Raise grpc.aio.AioRpcError, _StreamEnded or TimeoutError."""
        channel = self._channels.get(address, Role.SCHEDULER)
        stream = self._streams.get(address)
        # A new certificate means a new channel.
        if stream is not None and stream.channel is channel:
            try:
                return await stream.ask(message)
            except (grpc.aio.AioRpcError, _StreamEnded) as error:
                # It may have ended since the last message, for instance because the scheduler restarted.
                log.debug("scheduler at %s: %s; opening another stream", address, format_error(error))
        try:
            return await self._open_stream(address, channel).ask(message)
        except grpc.aio.AioRpcError as error:
            # The call ended while the message was written, and grpc.aio has lost its status.
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
        return await self._open_stream(address, channel).ask(message)

    def _open_stream(self, address: str, channel: grpc.aio.Channel) -> _PlacementStream:
        self._drop_stream(address)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        stream = self._streams[address] = _PlacementStream(channel, stub)
        return stream

    def _drop_stream(self, address: str) -> None:
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.close()

    def _schedulers(self) -> list[str]:
        """Return addresses of the schedulers that are worth asking now, and forget those that are gone."""
        addresses = [record.address for record in preferred(self._members, "scheduler")]
        self._reachability.keep_only(addresses)
        for address in self._streams.keys() - set(addresses):
            self._drop_stream(address)
        return [address for address in addresses if self._reachability.usable(address)]


class _StreamEnded(Exception):
    """The scheduler has ended the stream without an error."""

    def __init__(self) -> None:
        super().__init__("the stream has ended")


class _PlacementStream:
    """One Place call, with one message at a time under way."""

    def __init__(self, channel: grpc.aio.Channel, stub: scheduler_pb2_grpc.SchedulerAsyncStub) -> None:
        self.channel = channel
        self._call = stub.Place()

    async def ask(self, message: scheduler_pb2.PlaceManyRequest) -> scheduler_pb2.PlaceManyReply:
        """Return the reply to a message.

        Raise grpc.aio.AioRpcError or _StreamEnded if the stream has broken, TimeoutError if there is no reply
        in time. After any of them, and after a cancellation, the stream cannot be used again.
        """
        if self._call.done():
            raise _StreamEnded
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._call.write(message)
                reply = await self._call.read()
        except asyncio.InvalidStateError:
            raise _StreamEnded from None
        except TimeoutError:
            raise TimeoutError(f"no reply within {_DEADLINE_S:g} s") from None
        if not isinstance(reply, scheduler_pb2.PlaceManyReply):
            raise _StreamEnded
        return reply

    def close(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _resolve(pending: _PendingReply, reply: scheduler_pb2.PlaceReply | None) -> None:
    """Set the result unless it is set already or the caller was cancelled."""
    if not pending.done():
        pending.set_result(reply)
