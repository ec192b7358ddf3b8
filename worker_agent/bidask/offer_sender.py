"""The sending side of one worker: the requests that it offers, and their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tailrace.bid_ask import (
    BID_S,
    OFFER_S,
    Award,
    Bid,
    Done,
    Sender,
    Start,
    Starving,
    ToReceiver,
)
from tailrace.v1 import bidask_pb2
from worker_agent.bidask.messages import Wire, encode

# To (instance, address).
Post = Callable[[str, str, Wire], None]


@dataclass(slots=True)
class _Offer:
    request: bidask_pb2.OfferRequest
    addresses: dict[str, str]
    winner: str = ""
    taker: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class OfferSender:
    """Drive `Sender` with the clock and the messages of receivers."""

    def __init__(self, name: str, is_here: Callable[[str], bool], post: Post, outcomes: Counter[str]) -> None:
        """`is_here(request_id)` returns whether the request is still on this worker.

        `outcomes` counts "taken" and "kept".
        """
        self._sender = Sender(name)
        self._is_here = is_here
        self._post = post
        self._outcomes = outcomes
        self._offers: dict[str, _Offer] = {}
        # The request for which bids are awaited, and the timer that ends it.
        self._bidding: str | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, request: bidask_pb2.OfferRequest) -> bidask_pb2.OfferReply:
        """Find a taker; return once the request has moved, or will not."""
        request_id = request.request_id
        if request_id in self._offers or not self._is_here(request_id):
            return bidask_pb2.OfferReply(reason="it is already on offer, or not here")
        offer = _Offer(request, {r.instance_id: r.address for r in request.receivers})
        self._offers[request_id] = offer
        limit = request.most_tokens if request.HasField("most_tokens") else None
        messages = self._sender.offer(request_id, request.tokens, offer.addresses, limit)
        if not self._sender.has(request_id):
            del self._offers[request_id]
            return bidask_pb2.OfferReply(reason="no receiver to ask, or too many requests are on offer")
        try:
            self._send(messages)
            async with asyncio.timeout(OFFER_S):
                await offer.over.wait()
        except TimeoutError:
            return bidask_pb2.OfferReply(reason=f"not finished within {OFFER_S:g} s")
        finally:
            self._outcomes["taken" if offer.taker else "kept"] += 1
            self._forget(request_id)
        reason = "" if offer.taker else ("it did not move" if offer.winner else "no receiver bids")
        return bidask_pb2.OfferReply(taker_instance_id=offer.taker, reason=reason)

    def take(self, message: Bid | Start | Starving | Done) -> None:
        """Handle a receiver's message."""
        match message:
            case Bid():
                self._send(self._sender.on_bid(message))
            case Start():
                self._withdraw_if_gone(message.request_id)
                self._send(self._sender.on_start(message))
            case Starving():
                self._withdraw_if_gone(message.request_id)
                self._send(self._sender.on_starving(message))
            case Done():
                offer = self._offers.get(message.request_id)
                if offer is not None and message.accepted and offer.winner == message.receiver:
                    offer.taker = message.receiver
                self._send(self._sender.on_done(message))

    def no_bid(self, receiver: str, request_id: str) -> None:
        """Handle a receiver that has no room."""
        self._send(self._sender.on_no_bid(receiver, request_id))

    def lost(self, receiver: str) -> None:
        """Handle a receiver that does not answer."""
        self._send(self._sender.lost(receiver))

    def close(self) -> None:
        """Stop waiting for bids."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _close(self, request_id: str) -> None:
        self._withdraw_if_gone(request_id)
        self._send(self._sender.close(request_id))

    def _withdraw_if_gone(self, request_id: str) -> None:
        if not self._is_here(request_id):
            self._send(self._sender.withdraw(request_id))

    def _forget(self, request_id: str) -> None:
        """Drop an offer, whatever it was waiting for."""
        self._send(self._sender.give_up(request_id))
        self._offers.pop(request_id, None)

    def _send(self, messages: Sequence[tuple[str, ToReceiver]]) -> None:
        for receiver, message in messages:
            offer = self._offers.get(message.request_id)
            if offer is None:
                # A reply about a request that is not on offer: the coordinator knows the sender's address.
                self._post(receiver, "", encode(message))
                continue
            wire = encode(message)
            if isinstance(message, Award):
                offer.winner = receiver
                wire.award.from_epoch = offer.request.from_epoch
                wire.award.reason, wire.award.policy = offer.request.reason, offer.request.policy
                wire.award.traceparent = offer.request.traceparent
            self._post(receiver, offer.addresses.get(receiver, ""), wire)
        for request_id, offer in self._offers.items():
            if not self._sender.has(request_id):
                offer.over.set()
        self._set_deadline()

    def _set_deadline(self) -> None:
        bidding = self._sender.bidding
        if bidding == self._bidding:
            return
        self.close()
        self._bidding, self._deadline = bidding, None
        if bidding is not None:
            self._deadline = asyncio.get_running_loop().call_later(BID_S, self._close, bidding)
