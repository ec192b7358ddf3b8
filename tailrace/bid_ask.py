"""The bid-ask protocol (CascadeInfer, section 4.4): senders and receivers match without a coordinator.

Two state machines without I/O or clock: each call takes one message in and returns those to send, with
their destinations. Whoever runs them delivers messages in order for each pair.

    sender                                receiver
      Ask(tokens, sender's load)    -->
                                    <--     Bid(load, earliest start) or no bid
      Award(tokens, priority)       -->     into the priority queue
                                    <--     Start                      highest priority first
      Grant | Busy                  -->     transmit | try another sender's
                                    <--     Starving                   after too many Busy
      Grant (when free)             -->     transmit
                                    <--     Done(accepted)             it owns the request | sender keeps it

A request is its sender's until a transmission of it is accepted, and that receiver's from then on; the sender
awards it to one receiver at a time. A sender has bids made for one of its requests at a time, so that bids
for the next count what was awarded before ("The sender continues to hand over other requests"). A sender
transmits up to three requests at a time and a receiver takes up to three (section 5: "capped at three
parallel transfers"). By section 4.4 alone a sender would transmit one; but a live migration takes a step or
two, and under heavy load more requests than that outgrow the first stage.

`BID_S`, `OFFER_S` and `ATTEMPT_S` are the clock's part of the protocol: the worker and the simulator run it
by the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

# "keeps the three receivers with the earliest transmission start times"
EARLIEST: Final = 3
# Section 5: most transfers at a time.
TRANSFERS: Final = 3
# Busy answers to one request before its receiver says that it starves. The paper names no number.
STARVATION: Final = 3
# Requests that a sender may have buffered; beyond it they stay where they are. The paper names no number.
OFFERS_MAX: Final = 256
# Seconds that receivers have for their bids. The request goes on where it is meanwhile; only a receiver that
# hangs makes it take so long.
BID_S: Final = 1.0
# Seconds from an offer to its end: waiting for a turn, and the transfer, which has deadlines of its own.
OFFER_S: Final = 60.0
# Seconds after which a receiver asks again for requests whose senders were busy.
ATTEMPT_S: Final = 0.05
# Tokens a second of transfers until one has been measured, and the weight of each measurement.
TOKENS_PER_S: Final = 1e5
SMOOTHING: Final = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """A sender would hand over a request of so many tokens. `load`: total length of all it has buffered.

    `most_tokens`: whose load would exceed it with the request does not bid. None: no limit.
    """

    sender: str
    request_id: str
    tokens: int
    load: int
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Bid:
    """A receiver would take it. `earliest_s`: its buffered tokens over its measured throughput."""

    receiver: str
    request_id: str
    load: float
    earliest_s: float


@dataclass(frozen=True, slots=True)
class Award:
    """The request is the receiver's to fetch. `priority`: the sender's load; `most_tokens` as in `Ask`."""

    sender: str
    request_id: str
    tokens: int
    priority: int
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The receiver is ready for the request."""

    receiver: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The sender is transmitting another."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Starving:
    """The receiver has asked too often, and waits to be granted this request next."""

    receiver: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The transmission begins."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The request is gone: it finished before it was fetched."""

    sender: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Done:
    """The transmission is over. Not `accepted`: failed or declined, and the sender keeps the request."""

    receiver: str
    request_id: str
    accepted: bool


ToReceiver = Ask | Award | Busy | Grant | Withdraw
ToSender = Bid | Start | Starving | Done


def choose(bids: Sequence[Bid]) -> Bid | None:
    """The winner among bids in the order of their arrival (section 4.4).

    Leaves out the half with higher load (of an odd number, the smaller half), keeps the three that can
    start earliest, and takes the one that replied first.
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
    # Asked, and has not replied yet. None: nobody has been asked yet.
    awaited: set[str] | None = None
    bids: list[Bid] = field(default_factory=list)
    winner: str | None = None


class Sender:
    """The side that hands requests over."""

    def __init__(self, name: str, transfers: int = TRANSFERS) -> None:
        """`transfers`: most at a time."""
        self.name = name
        self._transfers = transfers
        self._offers: dict[str, _Offer] = {}
        self._load = 0
        # Those that nobody has been asked about, in the order of their offers; some may be gone already.
        self._unasked: deque[str] = deque()
        # Whose bids are awaited.
        self._bidding: str | None = None
        self._transmitting: set[str] = set()
        # Requests promised to starving receivers, in order.
        self._promised: list[str] = []

    @property
    def load(self) -> int:
        """Total length of all buffered requests."""
        return self._load

    @property
    def buffered(self) -> frozenset[str]:
        """Requests that are still this side's, on offer or awarded."""
        return frozenset(self._offers)

    def has(self, request_id: str) -> bool:
        """Whether the request is buffered."""
        return request_id in self._offers

    @property
    def bidding(self) -> str | None:
        """The request for which bids are awaited: `close` it when BID_S are over."""
        return self._bidding

    def offer(
        self, request_id: str, tokens: int, receivers: Iterable[str], most_tokens: int | None = None
    ) -> list[tuple[str, ToReceiver]]:
        """Buffer the request, and ask all candidates when its turn comes.

        It is not buffered, and stays where it is, without candidates and with `OFFERS_MAX` buffered already.
        """
        asked = sorted(set(receivers) - {self.name})
        if not asked or request_id in self._offers or len(self._offers) >= OFFERS_MAX:
            return []
        self._offers[request_id] = _Offer(tokens, asked, most_tokens)
        self._load += tokens
        self._unasked.append(request_id)
        return self._ask_next()

    def on_bid(self, bid: Bid) -> list[tuple[str, ToReceiver]]:
        """A bid; the last one that was waited for settles the matter. Late and strange ones are ignored."""
        offer = self._awaiting(bid.request_id, bid.receiver)
        if offer is None:
            return []
        offer.bids.append(bid)
        return self._replied(bid.request_id, bid.receiver)

    def on_no_bid(self, receiver: str, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The receiver has no room, or is gone."""
        if self._awaiting(request_id, receiver) is None:
            return []
        return self._replied(request_id, receiver)

    def close(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The bidding is over (all replied, or the deadline passed): award, or keep the request."""
        if request_id != self._bidding:
            return []
        offer = self._offers[request_id]
        won = choose(offer.bids)
        if won is None:
            self._drop(request_id)
            return self._ask_next()
        self._bidding = None
        offer.winner = won.receiver
        # The priority is the load with this request and all others that wait (Figure 5).
        award = Award(self.name, request_id, offer.tokens, self.load, offer.most_tokens)
        return [(won.receiver, award), *self._ask_next()]

    def on_start(self, start: Start) -> list[tuple[str, ToReceiver]]:
        """Grant while another transfer may begin and nobody starves; else Busy."""
        offer = self._offers.get(start.request_id)
        if offer is None or offer.winner != start.receiver:
            return [(start.receiver, Withdraw(self.name, start.request_id))]
        if start.request_id in self._transmitting:
            return []
        if len(self._transmitting) >= self._transfers or self._promised:
            return [(start.receiver, Busy(self.name, start.request_id))]
        return self._grant(start.request_id, offer)

    def on_starving(self, starving: Starving) -> list[tuple[str, ToReceiver]]:
        """Promise the next transmission; at once if another may begin."""
        offer = self._offers.get(starving.request_id)
        if offer is None or offer.winner != starving.receiver:
            return [(starving.receiver, Withdraw(self.name, starving.request_id))]
        if starving.request_id not in self._promised and starving.request_id not in self._transmitting:
            self._promised.append(starving.request_id)
        return self._next_promised()

    def on_done(self, done: Done) -> list[tuple[str, ToReceiver]]:
        """The request is the receiver's now, or, not accepted, this side's alone again."""
        offer = self._offers.get(done.request_id)
        if offer is None or offer.winner != done.receiver:
            return []
        self._drop(done.request_id)
        return self._next_promised()

    def withdraw(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The request finished here. Under transmission it is left alone: its end decides."""
        offer = self._offers.get(request_id)
        if offer is None or request_id in self._transmitting:
            return []
        self._drop(request_id)
        messages = [*self._next_promised(), *self._ask_next()]
        if offer.winner is not None:
            messages.insert(0, (offer.winner, Withdraw(self.name, request_id)))
        return messages

    def give_up(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The request is on offer no longer, whatever it waits for.

        Under transmission the receiver is told nothing: the migration's own journal knows how that ends.
        """
        if request_id not in self._transmitting:
            return self.withdraw(request_id)
        self._drop(request_id)
        return [*self._next_promised(), *self._ask_next()]

    def lost(self, receiver: str) -> list[tuple[str, ToReceiver]]:
        """The receiver is gone: what it was awarded is kept, and its bids are void.

        Whether a transmission to it was committed is for the migration's own journal to tell.
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
        """Ask for the next request, unless bids are awaited for one."""
        while self._unasked and self._bidding is None:
            request_id = self._unasked.popleft()
            offer = self._offers.get(request_id)
            # It may have been offered again since it was withdrawn.
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
    # A Start or Starving of it awaits its answer; or it is being transmitted.
    asked: bool = False
    granted: bool = False
    starving: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """KV of an engine in tokens: what is left of it, and what is held and queued for."""

    free_tokens: int
    load: int


def _fits(asked: Ask | Award, space: Space) -> bool:
    if asked.tokens > space.free_tokens:
        return False
    return asked.most_tokens is None or space.load + asked.tokens <= asked.most_tokens


class Receiver:
    """The side that takes requests over. Room for what it has won is set aside from the award on."""

    def __init__(
        self,
        name: str,
        space: Callable[[], Space],
        reserved: Callable[[str], bool],
        throughput: float = TOKENS_PER_S,
        transfers: int = TRANSFERS,
        starvation: int = STARVATION,
    ) -> None:
        """`space`: its engine's, now. `reserved(request_id)`: whether that counts blocks that were set aside
        for the request as used already. `throughput`: tokens a second of transfers, until some are measured.
        """
        self.name = name
        self._space = space
        self._reserved = reserved
        self._throughput = throughput
        self._transfers = transfers
        self._starvation = starvation
        self._won: dict[str, _Won] = {}
        self._order = 0

    @property
    def buffered_tokens(self) -> int:
        """Total length of the requests in its queue."""
        return sum(won.tokens for won in self._won.values())

    @property
    def queue(self) -> list[str]:
        """Requests that it has won and does not own yet, highest priority first, then in order of award."""
        won = self._won
        return sorted(won, key=lambda r: (-won[r].priority, won[r].order))

    @property
    def open_transfers(self) -> int:
        """Transmissions under way, and those that it has asked for."""
        return sum(won.asked or won.granted for won in self._won.values())

    @property
    def tokens_to_come(self) -> int:
        """Total length of the requests in its queue for which its engine has set no blocks aside yet."""
        return sum(won.tokens for request_id, won in self._won.items() if not self._reserved(request_id))

    def transferred(self, tokens: int, seconds: float) -> None:
        """A transfer took so long, waiting included."""
        rate = tokens / max(1e-6, seconds)
        self._throughput += SMOOTHING * (rate - self._throughput)

    def on_ask(self, ask: Ask) -> Bid | None:
        """A bid, or None without room for the request beside those already won, or beyond the limit."""
        space = self._space_left()
        if not _fits(ask, space):
            return None
        return Bid(self.name, ask.request_id, space.load, self.buffered_tokens / self._throughput)

    def on_award(self, award: Award) -> list[tuple[str, ToSender]]:
        """Into the queue; declined if what the bid said holds no longer."""
        if award.request_id in self._won:
            return []
        if not _fits(award, self._space_left()):
            return [(award.sender, Done(self.name, award.request_id, False))]
        self._won[award.request_id] = _Won(award.sender, award.tokens, award.priority, self._order)
        self._order += 1
        return self.attempt()

    def attempt(self) -> list[tuple[str, ToSender]]:
        """Start what can be started: at most three at a time, by priority.

        While a request starves, no other is attempted (section 4.4): its receiver waits for it. The runner
        calls this now and then, for requests whose senders were busy.
        """
        return self._attempt(skipped=None)

    def _attempt(self, skipped: str | None) -> list[tuple[str, ToSender]]:
        if any(won.starving and not won.granted for won in self._won.values()):
            return []
        left = self._transfers - self.open_transfers
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
        """Skipped for the next of another sender; beyond the threshold it starves."""
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
        """The transmission begins. False: of a request that was never won, which the runner answers with
        Done(accepted=False)."""
        won = self._won.get(grant.request_id)
        if won is None:
            return False
        won.asked, won.granted = False, True
        return True

    def finished(self, request_id: str, accepted: bool) -> list[tuple[str, ToSender]]:
        """The transmission is over; if accepted, this side owns the request from now on."""
        won = self._won.pop(request_id)
        return [(won.sender, Done(self.name, request_id, accepted)), *self.attempt()]

    def on_withdraw(self, withdraw: Withdraw) -> list[tuple[str, ToSender]]:
        """The request is gone."""
        won = self._won.get(withdraw.request_id)
        if won is None or won.sender != withdraw.sender:
            return []
        del self._won[withdraw.request_id]
        return self.attempt()

    def _space_left(self) -> Space:
        """The engine's, with what is still to come to it."""
        space, to_come = self._space(), self.tokens_to_come
        return Space(space.free_tokens - to_come, space.load + to_come)

    def lost(self, sender: str) -> list[tuple[str, ToSender]]:
        """The sender is gone, and what it had awarded with it."""
        for request_id in [r for r, won in self._won.items() if won.sender == sender]:
            del self._won[request_id]
        return self.attempt()
