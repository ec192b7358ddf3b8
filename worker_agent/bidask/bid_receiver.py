"""The receiving side of one worker: the requests that it has won, and their migrations to here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tailrace.bid_ask import (
    ATTEMPT_S,
    OFFER_S,
    Ask,
    Award,
    Bid,
    Busy,
    Done,
    Grant,
    Receiver,
    Space,
    ToSender,
    Withdraw,
)
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import bidask_pb2
from worker_agent.bidask.messages import Wire, encode, no_bid
from worker_agent.bidask.offer_sender import Post

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("fetches")


@dataclass(frozen=True, slots=True)
class Won:
    """A request to fetch: its award and its sender."""

    request_id: str
    sender: str
    tokens: int
    award: bidask_pb2.Award
    won_s: float


# Moves the request here; returns whether it moved.
Fetch = Callable[[Won], Awaitable[bool]]


class BidReceiver:
    """Drive `Receiver` with the clock and the messages of senders."""

    def __init__(
        self,
        name: str,
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        fetch: Fetch,
        post: Post,
    ) -> None:
        self._receiver = Receiver(name, space, reserved)
        self._fetch = fetch
        self._post = post
        self._won: dict[str, Won] = {}
        self._addresses: dict[str, str] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._attempts: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._won)

    async def close(self) -> None:
        """Cancel all fetches."""
        await cancel(*self._fetching.values())
        # Last, because the end of each fetch may have set it again.
        if self._attempts is not None:
            self._attempts.cancel()

    def take(self, message: Ask | Award | Busy | Grant | Withdraw, wire: Wire) -> None:
        """Handle a sender's message; `wire` contains the sender's address."""
        sender, request_id = message.sender, message.request_id
        self._addresses[sender] = wire.sender_address
        match message:
            case Ask():
                bid: Bid | None = self._receiver.on_ask(message)
                self._post(sender, wire.sender_address, no_bid(request_id) if bid is None else encode(bid))
            case Award():
                if request_id not in self._won:
                    self._won[request_id] = Won(
                        request_id, sender, message.tokens, wire.award, time.monotonic()
                    )
                self._post_all(self._receiver.on_award(message))
            case Busy():
                self._post_all(self._receiver.on_busy(message))
            case Grant():
                self._granted(message)
            case Withdraw():
                self._post_all(self._receiver.on_withdraw(message))
        self._drop_finished()

    def lost(self, sender: str) -> None:
        """Handle a sender that does not answer. What is being fetched from it ends by itself."""
        self._post_all(self._receiver.lost(sender))
        self._drop_finished()

    def _granted(self, grant: Grant) -> None:
        won = self._won.get(grant.request_id)
        if won is None or won.sender != grant.sender or not self._receiver.on_grant(grant):
            self._post_all([(grant.sender, Done(self._receiver.name, grant.request_id, False))])
            return
        if grant.request_id in self._fetching:
            return
        task = asyncio.create_task(self._run(won), name=f"fetch {won.request_id}")
        self._fetching[won.request_id] = task
        task.add_done_callback(lambda done: self._fetched(won.request_id, done))

    def _fetched(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(request_id, None)
        # Drop what was won and is not fetched any more now, not with the next message.
        self._drop_finished()
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, request_id, error)

    async def _run(self, won: Won) -> None:
        began_s, accepted = time.monotonic(), False
        try:
            accepted = await self._fetch(won)
        finally:
            if won.request_id in self._receiver.queue:
                messages = self._receiver.finished(won.request_id, accepted)
            else:
                messages = [(won.sender, Done(self._receiver.name, won.request_id, accepted))]
            self._post_all(messages)
            self._drop_finished()
        if accepted:
            self._receiver.transferred(won.tokens, time.monotonic() - began_s)

    def _attempt(self) -> None:
        self._attempts = None
        now_s = time.monotonic()
        for won in list(self._won.values()):
            # The sender has given it up by now, and its message was lost.
            if now_s - won.won_s > OFFER_S and won.request_id not in self._fetching:
                self._receiver.on_withdraw(Withdraw(won.sender, won.request_id))
        self._post_all(self._receiver.attempt())
        self._drop_finished()

    def _drop_finished(self) -> None:
        queue = set(self._receiver.queue)
        self._won = {
            request_id: won
            for request_id, won in self._won.items()
            if request_id in queue or request_id in self._fetching
        }
        senders = {won.sender for won in self._won.values()}
        self._addresses = {name: at for name, at in self._addresses.items() if name in senders}
        if queue and self._attempts is None:
            self._attempts = asyncio.get_running_loop().call_later(ATTEMPT_S, self._attempt)

    def _post_all(self, messages: Sequence[tuple[str, ToSender]]) -> None:
        for sender, message in messages:
            self._post(sender, self._addresses.get(sender, ""), encode(message))
