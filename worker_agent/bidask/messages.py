"""Convert between the messages of the bid-ask rules and protobuf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tailrace.bid_ask import (
    Ask,
    Award,
    Bid,
    Busy,
    Done,
    Grant,
    Start,
    Starving,
    ToReceiver,
    ToSender,
    Withdraw,
)
from tailrace.v1 import bidask_pb2

Message = ToReceiver | ToSender
Wire = bidask_pb2.BidAskMessage


class UnknownMessage(ValueError):
    """Not a message of this protocol."""


def encode(message: Message) -> Wire:
    """Encode a message without its sender. The caller adds an Award's details."""
    wire = Wire(request_id=message.request_id)
    match message:
        case Ask():
            wire_ask = bidask_pb2.Ask(
                tokens=message.tokens, load=message.load, most_tokens=message.most_tokens
            )
            wire.ask.CopyFrom(wire_ask)
        case Bid():
            wire.bid.CopyFrom(bidask_pb2.Bid(load=message.load, earliest_s=message.earliest_s))
        case Award():
            award = bidask_pb2.Award(
                tokens=message.tokens, priority=message.priority, most_tokens=message.most_tokens
            )
            wire.award.CopyFrom(award)
        case Done():
            wire.done.CopyFrom(bidask_pb2.Done(accepted=message.accepted))
        case Start():
            wire.start.SetInParent()
        case Busy():
            wire.busy.SetInParent()
        case Starving():
            wire.starving.SetInParent()
        case Grant():
            wire.grant.SetInParent()
        case Withdraw():
            wire.withdraw.SetInParent()
    return wire


def no_bid(request_id: str) -> Wire:
    """Build the reply of a receiver that does not bid."""
    wire = Wire(request_id=request_id)
    wire.no_bid.SetInParent()
    return wire


def decode(wire: Wire) -> Message:
    """Decode a message for the rules; NoBid is not one of them. Raise UnknownMessage."""
    body = wire.WhichOneof("body")
    reader = _READERS.get(body) if body is not None else None
    if reader is None:
        raise UnknownMessage(str(body))
    return reader(wire)


def _limit(body: bidask_pb2.Ask | bidask_pb2.Award) -> int | None:
    return body.most_tokens if body.HasField("most_tokens") else None


_READERS: Final[Mapping[str, Callable[[Wire], Message]]] = {
    "ask": lambda w: Ask(w.sender_id, w.request_id, w.ask.tokens, w.ask.load, _limit(w.ask)),
    "bid": lambda w: Bid(w.sender_id, w.request_id, w.bid.load, w.bid.earliest_s),
    "award": lambda w: Award(w.sender_id, w.request_id, w.award.tokens, w.award.priority, _limit(w.award)),
    "start": lambda w: Start(w.sender_id, w.request_id),
    "busy": lambda w: Busy(w.sender_id, w.request_id),
    "starving": lambda w: Starving(w.sender_id, w.request_id),
    "grant": lambda w: Grant(w.sender_id, w.request_id),
    "withdraw": lambda w: Withdraw(w.sender_id, w.request_id),
    "done": lambda w: Done(w.sender_id, w.request_id, w.done.accepted),
}
