"""Coordinate bid-ask on one worker: its offers, the requests it wins, and messages to other workers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from tailrace.bid_ask import Bid, Done, Space, Start, Starving
from tailrace.v1 import bidask_pb2
from worker_agent.bidask.bid_receiver import BidReceiver, Fetch
from worker_agent.bidask.messages import Peers, Send, UnknownMessage, Wire, decode
from worker_agent.bidask.offer_sender import OfferSender
from worker_agent.id_claim import Addressee

# Workers whose addresses are remembered, to reply to their messages.
_ADDRESSES_MAX: Final = 4_096


class MeantForAnother(Exception):
    """A message to another worker, which had this one's address; the message names both."""


class Coordinator:
    """Route messages; `Sender` and `Receiver` (tailrace/bid_ask.py) decide. Called on the event loop."""

    def __init__(
        self,
        own: Addressee,
        is_here: Callable[[str], bool],
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        fetch: Fetch,
        send: Send,
        outcomes: Counter[str],
    ) -> None:
        """Route messages between the parts.

        `here(request_id)` returns whether a request is on this worker; `space` and `reserved`: see
        `Receiver`; `outcomes` counts the outcomes of offers.
        """
        # This worker's address; set once it serves.
        self.address = ""
        self._own = own
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._peers = Peers(send, self._lost)
        self._offers = OfferSender(own.instance_id, is_here, self._post, outcomes)
        self._receiver = BidReceiver(own.instance_id, space, reserved, fetch, self._post)

    @property
    def on_offer(self) -> int:
        """Return the number of requests on offer."""
        return len(self._offers)

    @property
    def to_fetch(self) -> int:
        """Return the number of requests that were won but are not here yet."""
        return len(self._receiver)

    async def close(self) -> None:
        """Stop offering and fetching."""
        self._offers.close()
        await self._receiver.close()
        await self._peers.close()

    async def offer(self, request: bidask_pb2.OfferRequest) -> bidask_pb2.OfferReply:
        """Offer a request for the scheduler; return once the offer is over."""
        return await self._offers.offer(request)

    def take(self, wire: Wire) -> None:
        """Handle another worker's message. Raise UnknownMessage or MeantForAnother."""
        if refusal := self._own.refusal(wire.receiver_id):
            raise MeantForAnother(refusal)
        if not wire.sender_id or not wire.sender_address:
            raise UnknownMessage("no sender")
        self._addresses[wire.sender_id] = wire.sender_address
        self._addresses.move_to_end(wire.sender_id)
        if len(self._addresses) > _ADDRESSES_MAX:
            self._addresses.popitem(last=False)
        if wire.HasField("no_bid"):
            self._offers.no_bid(wire.sender_id, wire.request_id)
            return
        message = decode(wire)
        if isinstance(message, Bid | Start | Starving | Done):
            self._offers.take(message)
        else:
            self._receiver.take(message, wire)

    def _post(self, instance_id: str, address: str, wire: Wire) -> None:
        address = address or self._addresses.get(instance_id, "")
        if address:
            wire.sender_id, wire.sender_address = self._own.instance_id, self.address
            wire.receiver_id = instance_id
            self._peers.send(instance_id, address, wire)

    def _lost(self, instance_id: str) -> None:
        self._offers.lost(instance_id)
        self._receiver.lost(instance_id)
