"""The bid-ask protocol (CascadeInfer, section 4.4): senders and receivers match without a coordinator.

Two state machines without I/O or clock: each call takes one message in and returns those to send, with
their destinations. Whoever runs them delivers messages in order for each pair.

    sender                                receiver
      Ask(tokens, sender's load)    -->
                                    <--     Bid(load, earliest start) or no bid
      Award(tokens, priority)       -->     into the priority queue
                                    <--     Start                      highest priority first
      Grant | Busy                  -->     transmit | try the next
                                    <--     Starving                   after too many Busy
      Grant (when free)             -->     transmit
                                    <--     Done(accepted)             it owns the request | sender keeps it

A request is its sender's until a transmission of it is accepted, and that receiver's from then on; the sender
awards it to one receiver at a time. A sender transmits one request at a time (section 4.4), a
receiver takes up to three (section 5: "capped at three parallel transfers").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

# "keeps the three receivers with the earliest transmission start times"
EARLIEST: Final = 3
# Section 5: most transfers at a time.
TRANSFERS: Final = 3
# Busy answers to one request before its receiver says that it starves. The paper names no number.
STARVATION: Final = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """A sender would hand over a request of so many tokens. `load`: total length of all it has buffered."""

    sender: str
    request_id: str
    tokens: int
    load: int


@dataclass(frozen=True, slots=True)
class Bid:
    """A receiver would take it. `earliest_s`: its buffered tokens over its measured throughput."""

    receiver: str
    request_id: str
    load: float
    earliest_s: float


@dataclass(frozen=True, slots=True)
class Award:
    """The request is the receiver's to fetch. `priority`: the sender's load."""

    sender: str
    request_id: str
    tokens: int
    priority: int


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
    asked: set[str]
    bids: list[Bid] = field(default_factory=list)
    winner: str | None = None


class Sender:
    """The side that hands requests over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._offers: dict[str, _Offer] = {}
        self._transmitting: str | None = None
        # Requests promised to starving receivers, in order.
        self._promised: list[str] = []

    @property
    def load(self) -> int:
        """Total length of all buffered requests."""
        return sum(offer.tokens for offer in self._offers.values())

    @property
    def buffered(self) -> frozenset[str]:
        """Requests that are still this side's, on offer or awarded."""
        return frozenset(self._offers)

    def offer(self, request_id: str, tokens: int, receivers: Iterable[str]) -> list[tuple[str, Ask]]:
        """Ask all candidates. Without any the request is not buffered: it stays where it is."""
        asked = sorted(set(receivers) - {self.name})
        if not asked or request_id in self._offers:
            return []
        self._offers[request_id] = _Offer(tokens, set(asked))
        ask = Ask(self.name, request_id, tokens, self.load)
        return [(receiver, ask) for receiver in asked]

    def on_bid(self, bid: Bid) -> list[tuple[str, ToReceiver]]:
        """A bid; the last one that was waited for settles the matter. Late and strange ones are ignored."""
        offer = self._offers.get(bid.request_id)
        if offer is None or offer.winner is not None or bid.receiver not in offer.asked:
            return []
        offer.asked.discard(bid.receiver)
        offer.bids.append(bid)
        return self.close(bid.request_id) if not offer.asked else []

    def on_no_bid(self, receiver: str, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The receiver has no room, or is gone."""
        offer = self._offers.get(request_id)
        if offer is None or offer.winner is not None or receiver not in offer.asked:
            return []
        offer.asked.discard(receiver)
        return self.close(request_id) if not offer.asked else []

    def close(self, request_id: str) -> list[tuple[str, ToReceiver]]:
        """The bidding is over (all replied, or the deadline passed): award, or keep the request."""
        offer = self._offers.get(request_id)
        if offer is None or offer.winner is not None:
            return []
        won = choose(offer.bids)
        if won is None:
            del self._offers[request_id]
            return []
        offer.winner = won.receiver
        # The priority is the load with this request and all others that wait (Figure 5).
        return [(won.receiver, Award(self.name, request_id, offer.tokens, self.load))]

    def on_start(self, start: Start) -> list[tuple[str, ToReceiver]]:
        """Grant if nothing is being transmitted and nobody starves; else Busy."""
        offer = self._offers.get(start.request_id)
        if offer is None or offer.winner != start.receiver:
            return [(start.receiver, Withdraw(self.name, start.request_id))]
        if self._transmitting is not None or self._promised:
            return [(start.receiver, Busy(self.name, start.request_id))]
        return self._grant(start.request_id, offer)

    def on_starving(self, starving: Starving) -> list[tuple[str, ToReceiver]]:
        """Promise the next transmission; at once if there is none under way."""
        offer = self._offers.get(starving.request_id)
        if offer is None or offer.winner != starving.receiver:
            return [(starving.receiver, Withdraw(self.name, starving.request_id))]
        if starving.request_id not in self._promised and starving.request_id != self._transmitting:
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
        if offer is None or request_id == self._transmitting:
            return []
        self._drop(request_id)
        messages = self._next_promised()
        if offer.winner is not None:
            messages.insert(0, (offer.winner, Withdraw(self.name, request_id)))
        return messages

    def lost(self, receiver: str) -> list[tuple[str, ToReceiver]]:
        """The receiver is gone: what it was awarded is kept, and its bids are void.

        Whether a transmission to it was committed is for the migration's own journal to tell.
        """
        messages: list[tuple[str, ToReceiver]] = []
        for request_id, offer in list(self._offers.items()):
            offer.bids = [bid for bid in offer.bids if bid.receiver != receiver]
            if offer.winner == receiver:
                self._drop(request_id)
            else:
                messages += self.on_no_bid(receiver, request_id)
        return messages + self._next_promised()

    def _grant(self, request_id: str, offer: _Offer) -> list[tuple[str, ToReceiver]]:
        assert offer.winner is not None
        self._transmitting = request_id
        return [(offer.winner, Grant(self.name, request_id))]

    def _next_promised(self) -> list[tuple[str, ToReceiver]]:
        if self._transmitting is not None or not self._promised:
            return []
        request_id = self._promised.pop(0)
        return self._grant(request_id, self._offers[request_id])

    def _drop(self, request_id: str) -> None:
        del self._offers[request_id]
        if request_id in self._promised:
            self._promised.remove(request_id)
        if self._transmitting == request_id:
            self._transmitting = None


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


class Receiver:
    """The side that takes requests over.

    `free_tokens` and `load` tell of its own engine; `throughput` is its measured tokens a second of
    transfers. Room is set aside from award to the end of the transmission.
    """

    def __init__(
        self,
        name: str,
        free_tokens: Callable[[], int],
        load: Callable[[], float],
        throughput: float,
        transfers: int = TRANSFERS,
        starvation: int = STARVATION,
    ) -> None:
        self.name = name
        self._free_tokens = free_tokens
        self._load = load
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
        return sorted(self._won, key=lambda r: (-self._won[r].priority, self._won[r].order))

    @property
    def open_transfers(self) -> int:
        """Transmissions under way, and those that it has asked for."""
        return sum(won.asked or won.granted for won in self._won.values())

    def measured(self, throughput: float) -> None:
        """Tokens a second of transfers, as measured lately."""
        self._throughput = throughput

    def on_ask(self, ask: Ask) -> Bid | None:
        """A bid, or None without room for the request beside those already won."""
        if ask.tokens > self._free_tokens() - self.buffered_tokens:
            return None
        return Bid(self.name, ask.request_id, self._load(), self.buffered_tokens / self._throughput)

    def on_award(self, award: Award) -> list[tuple[str, ToSender]]:
        """Into the queue; declined if room is gone since the bid."""
        if award.request_id in self._won:
            return []
        if award.tokens > self._free_tokens() - self.buffered_tokens:
            return [(award.sender, Done(self.name, award.request_id, False))]
        self._won[award.request_id] = _Won(award.sender, award.tokens, award.priority, self._order)
        self._order += 1
        return self.attempt()

    def attempt(self) -> list[tuple[str, ToSender]]:
        """Start what can be started: at most three at a time, one from each sender, by priority.

        While a request starves, no other is attempted (section 4.4): its receiver waits for it. The runner
        calls this now and then, for requests whose senders were busy.
        """
        return self._attempt(skipped=None)

    def _attempt(self, skipped: str | None) -> list[tuple[str, ToSender]]:
        if any(won.starving and not won.granted for won in self._won.values()):
            return []
        senders = {won.sender for won in self._won.values() if won.asked or won.granted}
        if skipped is not None:
            senders.add(skipped)
        messages: list[tuple[str, ToSender]] = []
        for request_id in self.queue:
            won = self._won[request_id]
            if self.open_transfers >= self._transfers:
                break
            if won.sender in senders:
                continue
            won.asked = True
            senders.add(won.sender)
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
        won.asked, won.granted, won.starving = False, True, False
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

    def lost(self, sender: str) -> list[tuple[str, ToSender]]:
        """The sender is gone, and what it had awarded with it."""
        for request_id in [r for r, won in self._won.items() if won.sender == sender]:
            del self._won[request_id]
        return self.attempt()
