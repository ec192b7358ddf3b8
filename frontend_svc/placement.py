"""Where a request goes: the scheduler says, and while none answers the front end does as well as it can."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from frontend_svc.fleet import Members, may_prefill, usable
from frontend_svc.outbox import Outbox
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.channels import Channels
from tailrace.service.preferred import preferred
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 1.0
# One that did not answer is not asked again for so long: its deadline would be added to every request.
_SHUN_S: Final = 2.0
# The scheduler may name an instance that has just been lost; it is asked again so often.
_ASKS: Final = 3


@dataclass(frozen=True, slots=True)
class Placed:
    """The answer. `by`: the scheduler's policy, or "fallback"."""

    instance_id: str
    by: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing can take the request now."""

    reason: str


class Placement:
    """Asks Scheduler.Place; falls back on the attached instance that carries fewest of our streams."""

    def __init__(
        self, frontend_id: str, members: Members, outbox: Outbox, table: StreamTable, channels: Channels
    ) -> None:
        self._frontend_id = frontend_id
        self._members = members
        self._outbox = outbox
        self._table = table
        self._channels = channels
        self._shunned: dict[str, float] = {}

    async def choose(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        """An instance for the stream, attached at this moment. Takes at most a few seconds."""
        excluded = set(avoid)
        for _ in range(_ASKS):
            reply = await self._ask(stream, excluded)
            if reply is None:
                return self._fallback(avoid)
            if not reply.instance_id:
                return Refused(reply.refusal or "the scheduler named no instance")
            if reply.instance_id in self._outbox.attached():
                return Placed(reply.instance_id, reply.policy)
            excluded.add(reply.instance_id)
        return self._fallback(avoid)

    async def _ask(self, stream: Stream, excluded: set[str]) -> scheduler_pb2.PlaceReply | None:
        """The first scheduler that answers, the leader before the others; None: none does."""
        request = scheduler_pb2.PlaceRequest(
            request_id=stream.request_id,
            frontend_id=self._frontend_id,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.accepted,
            max_tokens=stream.max_tokens,
            excluded_instance_ids=sorted(excluded),
            traceparent=stream.traceparent,
        )
        for address in self._schedulers():
            stub = scheduler_pb2_grpc.SchedulerStub(self._channels.get(address))
            try:
                reply: scheduler_pb2.PlaceReply = await stub.Place(request, timeout=_DEADLINE_S)
                return reply
            except grpc.aio.AioRpcError as error:
                log.warning("scheduler at %s: %s", address, error.code().name)
                self._shunned[address] = time.monotonic() + _SHUN_S
        return None

    def _schedulers(self) -> Iterator[str]:
        """Addresses worth asking now."""
        now_s = time.monotonic()
        # Restarted schedulers have other addresses; the old ones are not kept.
        self._shunned = {a: until_s for a, until_s in self._shunned.items() if until_s > now_s}
        addresses = (record.address for record in preferred(self._members, "scheduler"))
        return (address for address in addresses if address not in self._shunned)

    def _fallback(self, avoid: frozenset[str]) -> Placed | Refused:
        candidates = [i for i in usable(self._members, self._outbox.attached()) if i not in avoid]
        if not candidates:
            return Refused("no instance answers")
        carried = Counter(stream.owner for stream in self._table)
        best = min(may_prefill(self._members, candidates), key=lambda i: (carried[i], i))
        return Placed(best, "fallback")
