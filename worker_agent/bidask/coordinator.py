"""One worker's part in bid-ask: its offers, its takings, and the way to the other workers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from tailrace.bid_ask import Bid, Done, Space, Start, Starving
from tailrace.v1 import bidask_pb2
from worker_agent.bidask.bid_receiver import BidReceiver, Fetch
from worker_agent.bidask.messages import UnknownMessage, Wire, decode
from worker_agent.bidask.offer_sender import OfferSender
from worker_agent.bidask.peers import Peers, Send

# Workers whose addresses are remembered, for answers to what they say.
_ADDRESSES_MAX: Final = 4_096


class Coordinator:
    """Thin: the rules decide, this carries messages. Called on the event loop."""

    def __init__(
        self,
        name: str,
        here: Callable[[str], bool],
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        fetch: Fetch,
        send: Send,
        outcomes: Counter[str],
    ) -> None:
        """`here(request_id)`: whether a request is on this worker; `space`, `reserved`: of its engine,
        as `Receiver` has them; `outcomes` of offers are counted there."""
        # Where others reach this worker; set once it serves.
        self.address = ""
        self._name = name
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._peers = Peers(send, self._lost)
        self._offers = OfferSender(name, here, self._post, outcomes)
        self._receiver = BidReceiver(name, space, reserved, fetch, self._post)

    @property
    def on_offer(self) -> int:
        """Requests that look for a taker."""
        return len(self._offers)

    @property
    def to_fetch(self) -> int:
        """Requests that were won and are not here yet."""
        return len(self._receiver)

    async def close(self) -> None:
        """Offer and fetch no more."""
        self._offers.close()
        await self._receiver.close()
        await self._peers.close()

    async def offer(self, request: bidask_pb2.OfferRequest) -> bidask_pb2.OfferReply:
        """The scheduler's: find a taker, and answer when it is over."""
        return await self._offers.offer(request)

    def take(self, wire: Wire) -> None:
        """Another worker's message. Raises UnknownMessage."""
        if not wire.sender_id or not wire.sender_address:
            raise UnknownMessage("it names no sender")
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
            wire.sender_id, wire.sender_address = self._name, self.address
            self._peers.send(instance_id, address, wire)

    def _lost(self, instance_id: str) -> None:
        self._offers.lost(instance_id)
        self._receiver.lost(instance_id)
