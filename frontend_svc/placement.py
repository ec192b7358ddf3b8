"""Where a request goes: the scheduler says, and while none answers the front end does as well as it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from frontend_svc.fleet import Fleet, may_prefill, usable
from frontend_svc.outbox import Outbox
from frontend_svc.place_calls import PlaceCalls
from frontend_svc.prefixes import Prefix, prefix_of
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.channels import Channels
from tailrace.v1 import scheduler_pb2, worker_pb2

# The scheduler may name an instance that has just been lost; it is asked again so often.
_ASKS: Final = 3


@dataclass(frozen=True, slots=True)
class Placed:
    """The answer. `by`: the scheduler's policy, or "fallback".

    `pull`: whose KV of the request's first tokens the instance is to fetch; None: nobody's.
    """

    instance_id: str
    by: str
    pull: worker_pb2.Pull | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing can take the request now."""

    reason: str


class Placement:
    """Asks a scheduler; falls back on the attached instance that carries fewest of our streams.

    A stream that has tokens goes on with the model that made them, or not at all.
    """

    def __init__(
        self, frontend_id: str, fleet: Fleet, outbox: Outbox, table: StreamTable, channels: Channels
    ) -> None:
        self._frontend_id = frontend_id
        self._fleet = fleet
        self._outbox = outbox
        self._table = table
        self._calls = PlaceCalls(fleet, channels)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._calls.close()

    def model_of(self, instance_id: str) -> str:
        """Key of the model that an instance runs; empty: it is not known."""
        return self._fleet.model_of(instance_id)

    async def choose(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        """An instance for the stream, attached at this moment. Takes at most a few seconds."""
        # The scheduler may not have heard yet which instances drain.
        unable = self._fleet.unable(stream.needs)
        excluded = {*avoid, *self._fleet.draining, *unable}
        prefix = prefix_of(stream, self._fleet.naming)
        for _ in range(_ASKS):
            reply = await self._ask(stream, excluded, prefix)
            if reply is None:
                return self._fallback(stream, avoid | unable)
            if not reply.instance_id:
                return Refused(reply.refusal or "the scheduler named no instance")
            if self._may_take(reply.instance_id, stream):
                return Placed(reply.instance_id, reply.policy, _pull(reply))
            excluded.add(reply.instance_id)
        return self._fallback(stream, avoid | unable)

    async def _ask(
        self, stream: Stream, excluded: set[str], prefix: Prefix
    ) -> scheduler_pb2.PlaceReply | None:
        """What a scheduler says; None: none does."""
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
        )
        return await self._calls.ask(request)

    def _model(self, stream: Stream) -> str:
        """Key of the model that may answer."""
        return stream.model if stream.accepted and stream.model else self._fleet.model

    def _may_take(self, instance_id: str, stream: Stream) -> bool:
        attached = instance_id in self._outbox.attached()
        return attached and self._fleet.is_model(instance_id, self._model(stream))

    def _fallback(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        model = self._model(stream)
        candidates = [
            i
            for i in usable(self._fleet, self._outbox.attached())
            if i not in avoid and self._fleet.is_model(i, model)
        ]
        if not candidates:
            return Refused("no instance of its model answers" if stream.accepted else "no instance answers")
        count = self._table.count_owned
        best = min(may_prefill(self._fleet, candidates), key=lambda i: (count(i), i))
        return Placed(best, "fallback")


def _pull(reply: scheduler_pb2.PlaceReply) -> worker_pb2.Pull | None:
    if not reply.pull_address:
        return None
    return worker_pb2.Pull(
        instance_id=reply.pull_from_instance_id, address=reply.pull_address, tokens=reply.pull_tokens
    )
