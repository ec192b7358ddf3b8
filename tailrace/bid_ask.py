"""The bid-ask protocol (CascadeInfer, section 4.4): senders and receivers match without a coordinator.

Two state machines without I/O or clock: each call takes one message and returns the messages to send, with
their destinations. The caller delivers messages in order for each pair.

    sender                                receiver
      Ask(tokens, sender's load)    -->
                                    <--     Bid(load, earliest start) or no bid
      Award(tokens, priority)       -->     into the priority queue
                                    <--     Start                      highest priority first
      Grant | Busy                  -->     transmit | try another sender's
                                    <--     Starving                   after too many Busy
      Grant (when free)             -->     transmit
                                    <--     Done(accepted)             it owns the request | sender keeps it

The sender owns a request until a receiver accepts its transmission, and awards it to one receiver at a time.
It collects bids for one request at a time, so that bids for the next one account for earlier awards ("The
sender continues to hand over other requests"). A sender transmits up to three requests at a time and a
receiver takes up to three (section 5: "capped at three parallel transfers"). By section 4.4 alone a sender
would transmit one; but a live migration takes a step or two, and under heavy load requests outgrow the first
stage faster than that.

`BID_S`, `OFFER_S` and `ATTEMPT_S` are the protocol's timeouts, shared by the worker and the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tailrace.handover import TRANSFERS

# "keeps the three receivers with the earliest transmission start times"
EARLIEST: Final = 3
# Busy replies for one request after which its receiver reports starvation. The paper names no number.
STARVATION: Final = 3
# Requests that a sender may buffer; further ones stay where they are. The paper names no number.
OFFERS_MAX: Final = 256
# Deadline for bids, in seconds. The request keeps running meanwhile; only a hung receiver takes this long.
BID_S: Final = 1.0
# Lifetime of an offer, in seconds: waiting for its turn, and the transfer, which has its own deadlines.
OFFER_S: Final = 60.0
# Seconds after which a receiver retries requests whose senders were busy.
ATTEMPT_S: Final = 0.05
# Transfer rate in tokens per second until one is measured, and the weight of each measurement.
TOKENS_PER_S: Final = 1e5
SMOOTHING: Final = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """A sender asks for bids on a request. `load`: total tokens of the sender's buffered requests.

    `most_tokens`: a receiver whose load with the request would exceed this does not bid. None: no limit.
    """

    sender: str
    request_id: str
    tokens: int
    load: int
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Bid:
    """A receiver bids. `earliest_s`: its buffered tokens over its measured throughput, in seconds."""

    receiver: str
    request_id: str
    load: float
    earliest_s: float


@dataclass(frozen=True, slots=True)
class Award:
    """The receiver won the request. `priority`: the sender's load; `most_tokens`: as in `Ask`."""

    sender: str
    request_id: str
    tokens: int
    priority: int
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The receiver is ready for the transmission."""

    receiver: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The sender has too many transmissions in progress."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Starving:
    """The receiver got too many Busy replies, and waits until it is granted this request."""

    receiver: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The transmission begins."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The request is no longer available: it finished before its transmission."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Done:
    """The transmission is over. Not `accepted`: it failed or was declined; the sender keeps the request."""

    receiver: str
    request_id: str
    accepted: bool


ToReceiver = Ask | Award | Busy | Grant | Withdraw
ToSender = Bid | Start | Starving | Done


def choose(bids: Sequence[Bid]) -> Bid | None:
    """Return the winner among bids, given in order of arrival (section 4.4); None without bids.

    Discard the half with higher load (of an odd number, the smaller half), keep the three that can start
    earliest, and take the one that replied first.
    """
    order = {bid.receiver: at for at, bid in enumerate(bids)}
    lighter = sorted(bids, key=lambda bid: (bid.load, order[bid.receiver]))[: (len(bids) + 1) // 2]
    earliest = sorted(lighter, key=lambda bid: (bid.earliest_s, order[bid.receiver]))[:EARLIEST]
    return min(earliest, key=lambda bid: order[bid.receiver], default=None)


@dataclass(slots=True)
class _Offer:
    tokens: int
    receivers: list[str]
    most_tokens: int | None
    # Receivers that have not replied yet. None: bids have not been requested yet.
    awaited: set[str] | None = None
    bids: list[Bid] = field(default_factory=list)
    winner: str | None = None


class Sender:
    """The sender of requests. Each method returns the messages to send."""

    def __init__(self, name: str, transfers: int = TRANSFERS) -> None:
        """`transfers`: maximum number of concurrent transmissions."""
        self.name = name
        self._transfers = transfers
        self._offers: dict[str, _Offer] = {}
        self._load = 0
        # Requests waiting for their bidding, in order of their offers; some may have been withdrawn.
        self._unasked: deque[str] = deque()
        # The request for which bids are awaited.
        self._bidding: str | None = None
        self._transmitting: set[str] = set()
        # Requests promised to starving receivers, in order.
        self._promised: list[str] = []

    @property
    def load(self) -> int:
        """Return the total tokens of all buffered requests."""
        return self._load

    @property
    def buffered(self) -> frozenset[str]:
        """Return the requests that this side still owns, offered or awarded."""
        return frozenset(self._offers)

    def has(self, request_id: str) -> bool:
        """Return whether the request is buffered."""
        return request_id in self._offers

    @property
    def bidding(self) -> str | None:
        """Return the request for which bids are awaited, to be closed with `close` after BID_S."""
        return self._bidding

    def offer(
        self, request_id: str, tokens: int, receivers: Iterable[str], most_tokens: int | None = None
    ) -> list[tuple[str, ToReceiver]]:
        """Buffer a request, and ask all receivers for bids when it is its turn.

        The request is ignored, and stays where it is, without receivers or if `OFFERS_MAX` are buffered.
        """
        receiver_names = sorted(set(receivers) - {self.name})
        if not receiver_names or request_id in self._offers or len(self._offers) >= OFFERS_MAX:
            return []
        self._offers[request_id] = _Offer(tokens, receiver_names, most_tokens)
        self._load += tokens
        self._unasked.append(request_id)
        return self._ask_next()

    def on_bid(self, bid: Bid) -> list[tuple[str, ToReceiver]]:
        """Record a bid; the last awaited one closes the bidding. Late and unexpected bids are ignored."""
        offer = self._awaiting(bid.request_id, bid.receiver)
        if offer is None:
            return []
        offer.bids.append(bid)
        return self._replied(bid.request_id, bid.receiver)

    def on_no_bid(self, receiver: str, request_id: str) -> list[tuple[str, ToReceiver]]:
        """Record that a receiver does not bid, because it has no room or is lost."""
        if self._awaiting(request_id, receiver) is None:
            return []
        return self._replied(request_id, receiver)

    def close(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """Close the bidding (all replied, or the deadline passed): award the request, or keep it."""
        if request_id != self._bidding:
            return []
        offer = self._offers[request_id]
        won = choose(offer.bids)
        if won is None:
            self._drop(request_id)
            return self._ask_next()
        self._bidding = None
        offer.winner = won.receiver
        # The priority is the load including this request and all others that wait (Figure 5).
        award = Award(self.name, request_id, offer.tokens, self.load, offer.most_tokens)
        return [(won.receiver, award), *self._ask_next()]

    def on_start(self, start: Start) -> list[tuple[str, ToReceiver]]:
        """Grant the transmission if a transfer is free and no receiver starves; else reply Busy."""
        offer = self._offers.get(start.request_id)
        if offer is None or offer.winner != start.receiver:
            return [(start.receiver, Withdraw(self.name, start.request_id))]
        if start.request_id in self._transmitting:
            return []
        if len(self._transmitting) >= self._transfers or self._promised:
            return [(start.receiver, Busy(self.name, start.request_id))]
        return self._grant(start.request_id, offer)

    def on_starving(self, starving: Starving) -> list[tuple[str, ToReceiver]]:
        """Promise the receiver the next transmission; grant it at once if a transfer is free."""
        offer = self._offers.get(starving.request_id)
        if offer is None or offer.winner != starving.receiver:
            return [(starving.receiver, Withdraw(self.name, starving.request_id))]
        if starving.request_id not in self._promised and starving.request_id not in self._transmitting:
            self._promised.append(starving.request_id)
        return self._next_promised()

    def on_done(self, done: Done) -> list[tuple[str, ToReceiver]]:
        """Drop a request after its transmission: the receiver owns it, or, if not accepted, it stays here."""
        offer = self._offers.get(done.request_id)
        if offer is None or offer.winner != done.receiver:
            return []
        self._drop(done.request_id)
        return self._next_promised()

    def withdraw(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """Withdraw a request that finished here. During its transmission do nothing: `on_done` decides."""
        offer = self._offers.get(request_id)
        if offer is None or request_id in self._transmitting:
            return []
        self._drop(request_id)
        messages = [*self._next_promised(), *self._ask_next()]
        if offer.winner is not None:
            messages.insert(0, (offer.winner, Withdraw(self.name, request_id)))
        return messages

    def give_up(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """Drop an offer in any state, for instance after OFFER_S.

        During a transmission the receiver is not notified: the migration's journal records how that ends.
        """
        if request_id not in self._transmitting:
            return self.withdraw(request_id)
        self._drop(request_id)
        return [*self._next_promised(), *self._ask_next()]

    def lost(self, receiver: str) -> list[tuple[str, ToReceiver]]:
        """Handle the loss of a receiver: keep what it was awarded, and void its bids.

        Whether a transmission to it was committed is recorded in the migration's journal.
        """
        for request_id, offer in list(self._offers.items()):
            offer.bids = [bid for bid in offer.bids if bid.receiver != receiver]
            if receiver in offer.receivers:
                offer.receivers.remove(receiver)
            if offer.winner == receiver or not offer.receivers:
                self._drop(request_id)
        bidding = self._bidding
        messages = self.on_no_bid(receiver, bidding) if bidding is not None else self._ask_next()
        return messages + self._next_promised()

    def _awaiting(self, request_id: str, receiver: str) -> _Offer | None:
        if request_id != self._bidding:
            return None
        offer = self._offers[request_id]
        assert offer.awaited is not None
        return offer if receiver in offer.awaited else None

    def _replied(self, request_id: str, receiver: str) -> list[tuple[str, ToReceiver]]:
        awaited = self._offers[request_id].awaited
        assert awaited is not None
        awaited.discard(receiver)
        return self.close(request_id) if not awaited else []

    def _ask_next(self) -> list[tuple[str, ToReceiver]]:
        """Request bids for the next request, unless bids are awaited."""
        while self._unasked and self._bidding is None:
            request_id = self._unasked.popleft()
            offer = self._offers.get(request_id)
            # None: withdrawn. Asked already: withdrawn and offered again since.
            if offer is not None and offer.awaited is None:
                self._bidding = request_id
                offer.awaited = set(offer.receivers)
                ask = Ask(self.name, request_id, offer.tokens, self._load, offer.most_tokens)
                return [(receiver, ask) for receiver in offer.receivers]
        return []

    def _grant(self, request_id: str, offer: _Offer) -> list[tuple[str, ToReceiver]]:
        assert offer.winner is not None
        self._transmitting.add(request_id)
        return [(offer.winner, Grant(self.name, request_id))]

    def _next_promised(self) -> list[tuple[str, ToReceiver]]:
        messages: list[tuple[str, ToReceiver]] = []
        while self._promised and len(self._transmitting) < self._transfers:
            request_id = self._promised.pop(0)
            messages += self._grant(request_id, self._offers[request_id])
        return messages

    def _drop(self, request_id: str) -> None:
        self._load -= self._offers.pop(request_id).tokens
        if request_id in self._promised:
            self._promised.remove(request_id)
        self._transmitting.discard(request_id)
        if self._bidding == request_id:
            self._bidding = None


@dataclass(slots=True)
class _Won:
    sender: str
    tokens: int
    priority: int
    order: int
    failed: int = 0
    # A Start or Starving for it awaits the reply.
    asked: bool = False
    # It is being transmitted.
    granted: bool = False
    starving: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """KV of an engine in tokens: free, and used or queued for (`load`)."""

    free_tokens: int
    load: int


def _fits(message: Ask | Award, space: Space) -> bool:
    if message.tokens > space.free_tokens:
        return False
    return message.most_tokens is None or space.load + message.tokens <= message.most_tokens


class Receiver:
    """The receiver of requests. Each method returns the messages to send.

    KV for a request is reserved from its award on.
    """

    def __init__(
        self,
        name: str,
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        throughput: float = TOKENS_PER_S,
        starvation: int = STARVATION,
    ) -> None:
        """`space`: returns the engine's current space. `reserved(request_id)`: whether that already includes
        blocks reserved for the request. `throughput`: transfer rate in tokens per second until one is
        measured. `starvation`: Busy replies for one request after which it starves.
        """
        self.name = name
        self._space = space
        self._reserved = reserved
        self._throughput = throughput
        self._starvation = starvation
        self._won: dict[str, _Won] = {}
        self._order = 0

    @property
    def buffered_tokens(self) -> int:
        """Return the total tokens of the requests in the queue."""
        return sum(won.tokens for won in self._won.values())

    @property
    def queue(self) -> list[str]:
        """Return the requests that were won but not received yet, by priority, then in order of award."""
        won = self._won
        return sorted(won, key=lambda r: (-won[r].priority, won[r].order))

    @property
    def open_transfers(self) -> int:
        """Return the number of transmissions in progress or requested."""
        return sum(won.asked or won.granted for won in self._won.values())

    @property
    def pending_tokens(self) -> int:
        """Return the total tokens of queued requests for which the engine has reserved no blocks yet."""
        return sum(won.tokens for request_id, won in self._won.items() if not self._reserved(request_id))

    def transferred(self, tokens: int, seconds: float) -> None:
        """Record the duration of a transfer, including waiting."""
        rate = tokens / max(1e-6, seconds)
        self._throughput += SMOOTHING * (rate - self._throughput)

    def on_ask(self, ask: Ask) -> Bid | None:
        """Return a bid; None if there is no room beside the won requests, or beyond the limit."""
        space = self._space_left()
        if not _fits(ask, space):
            return None
        return Bid(self.name, ask.request_id, space.load, self.buffered_tokens / self._throughput)

    def on_award(self, award: Award) -> list[tuple[str, ToSender]]:
        """Queue an awarded request; decline it if it no longer fits."""
        if award.request_id in self._won:
            return []
        if not _fits(award, self._space_left()):
            return [(award.sender, Done(self.name, award.request_id, False))]
        self._won[award.request_id] = _Won(award.sender, award.tokens, award.priority, self._order)
        self._order += 1
        return self.attempt()

    def attempt(self) -> list[tuple[str, ToSender]]:
        """Request as many transmissions as allowed, by priority.

        While a request starves, no other is attempted (section 4.4). The caller repeats this every ATTEMPT_S
        for requests whose senders were busy.
        """
        return self._attempt(skipped=None)

    def _attempt(self, skipped: str | None) -> list[tuple[str, ToSender]]:
        if any(won.starving and not won.granted for won in self._won.values()):
            return []
        left = TRANSFERS - self.open_transfers
        messages: list[tuple[str, ToSender]] = []
        for request_id in self.queue if left > 0 else ():
            won = self._won[request_id]
            if won.asked or won.granted or won.sender == skipped:
                continue
            if len(messages) >= left:
                break
            won.asked = True
            messages.append((won.sender, Start(self.name, request_id)))
        return messages

    def on_busy(self, busy: Busy) -> list[tuple[str, ToSender]]:
        """Skip the request in favor of another sender's; after too many Busy replies, report starvation."""
        won = self._won.get(busy.request_id)
        if won is None or won.granted:
            return []
        won.failed += 1
        if won.failed > self._starvation:
            won.starving = True
            return [(won.sender, Starving(self.name, busy.request_id))]
        won.asked = False
        return self._attempt(skipped=won.sender)

    def on_grant(self, grant: Grant) -> bool:
        """Record the start of a transmission; return False for a request that was not won, to which the
        caller replies with Done(accepted=False)."""
        won = self._won.get(grant.request_id)
        if won is None:
            return False
        won.asked, won.granted = False, True
        return True

    def finished(self, request_id: str, accepted: bool) -> list[tuple[str, ToSender]]:
        """Record the end of a transmission; if accepted, this side now owns the request."""
        won = self._won.pop(request_id)
        return [(won.sender, Done(self.name, request_id, accepted)), *self.attempt()]

    def on_withdraw(self, withdraw: Withdraw) -> list[tuple[str, ToSender]]:
        """Drop a request that its sender withdrew."""
        won = self._won.get(withdraw.request_id)
        if won is None or won.sender != withdraw.sender:
            return []
        del self._won[withdraw.request_id]
        return self.attempt()

    def _space_left(self) -> Space:
        """Return the engine's space less the KV of pending requests."""
        space, pending = self._space(), self.pending_tokens
        return Space(space.free_tokens - pending, space.load + pending)

    def lost(self, sender: str) -> list[tuple[str, ToSender]]:
        """Handle the loss of a sender: drop the requests that it awarded."""
        for request_id in [r for r, won in self._won.items() if won.sender == sender]:
            del self._won[request_id]
        return self.attempt()
