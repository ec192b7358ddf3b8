"""The bid-ask protocol under any order of messages: each request has one owner, and bidding terminates."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bid_ask import (
    OFFERS_MAX,
    Ask,
    Award,
    Bid,
    Busy,
    Done,
    Grant,
    Receiver,
    Sender,
    Space,
    Start,
    Starving,
    ToReceiver,
    ToSender,
    Withdraw,
    choose,
)
from tailrace.handover import TRANSFERS
from tests.policy.fleets import quick

# More than this many steps for so few requests is a loop.
MOST_STEPS = 20_000


class Market:
    """Run senders and receivers; deliver messages in order within each pair, in any order between pairs."""

    def __init__(self, senders: int, rooms: list[int], requests: list[tuple[int, int]], seed: int) -> None:
        self.rng = random.Random(seed)
        self.room = {f"r{n}": room for n, room in enumerate(rooms)}
        self.senders = {f"s{n}": Sender(f"s{n}") for n in range(senders)}
        self.receivers = {name: self._receiver(name) for name in self.room}
        self.home = {f"q{n}": f"s{sender % senders}" for n, (sender, _) in enumerate(requests)}
        self.tokens = {f"q{n}": tokens for n, (_, tokens) in enumerate(requests)}
        self.owner = dict(self.home)
        self.not_offered = list(self.tokens)
        self.wires: dict[tuple[str, str], deque[ToReceiver | ToSender]] = {}
        self.transmitting: dict[str, str] = {}
        # Requests whose blocks the receiver's engine has reserved, some time after the grant.
        self.reserved: set[str] = set()
        self.finished: set[str] = set()
        self.starved: list[str] = []

    def _receiver(self, name: str) -> Receiver:
        return Receiver(
            name,
            lambda: Space(self.room[name], 10_000 - self.room[name]),
            lambda request_id: request_id in self.reserved,
            throughput=1_000.0,
            starvation=1,
        )

    def send(self, source: str, messages: Sequence[tuple[str, ToReceiver | ToSender]]) -> None:
        for target, message in messages:
            self.wires.setdefault((source, target), deque()).append(message)

    def run(self) -> None:
        """Run until no event is left."""
        for _ in range(MOST_STEPS):
            self.check()
            choices = [partial(self.deliver_next, key) for key, wire in self.wires.items() if wire]
            choices += [partial(self.reserve, r) for r in self.transmitting if r not in self.reserved]
            choices += [partial(self.end_transfer, r) for r in self.transmitting if r in self.reserved]
            choices += [partial(self.offer, r) for r in self.not_offered]
            if not choices:
                # Receivers whose senders were busy retry.
                for name, receiver in self.receivers.items():
                    self.send(name, receiver.attempt())
                if not any(self.wires.values()):
                    return
                continue
            self.rng.choice(choices)()
            if self.rng.random() < 0.02:
                self.finish_some()
        raise AssertionError("does not end")

    def offer(self, request_id: str) -> None:
        self.not_offered.remove(request_id)
        sender = self.senders[self.home[request_id]]
        if request_id not in self.finished:
            self.send(sender.name, sender.offer(request_id, self.tokens[request_id], self.receivers))

    def finish_some(self) -> None:
        """Finish a request on its sender."""
        mine = [r for r, owner in self.owner.items() if owner == self.home[r] and r not in self.transmitting]
        if mine:
            request_id = self.rng.choice(sorted(mine))
            sender = self.senders[self.home[request_id]]
            messages = sender.withdraw(request_id)
            if request_id not in sender.buffered:
                self.finished.add(request_id)
            self.send(sender.name, messages)

    def deliver_next(self, wire: tuple[str, str]) -> None:
        self.deliver(wire, self.wires[wire].popleft())

    def deliver(self, wire: tuple[str, str], message: ToReceiver | ToSender) -> None:
        source, target = wire
        match message:
            case Ask():
                bid = self.receivers[target].on_ask(message)
                if bid is not None:
                    self.wires.setdefault((target, source), deque()).append(bid)
                else:
                    sender = self.senders[source]
                    self.send(source, sender.on_no_bid(target, message.request_id))
            case Award():
                self.send(target, self.receivers[target].on_award(message))
            case Busy():
                self.send(target, self.receivers[target].on_busy(message))
            case Withdraw():
                self.send(target, self.receivers[target].on_withdraw(message))
            case Grant():
                if self.receivers[target].on_grant(message):
                    assert message.request_id not in self.transmitting
                    self.transmitting[message.request_id] = target
                else:
                    self.send(target, [(source, Done(target, message.request_id, False))])
            case Bid():
                self.send(target, self.senders[target].on_bid(message))
            case Start():
                self.send(target, self.senders[target].on_start(message))
            case Starving():
                self.starved.append(message.request_id)
                self.send(target, self.senders[target].on_starving(message))
            case Done():
                self.send(target, self.senders[target].on_done(message))

    def reserve(self, request_id: str) -> None:
        self.reserved.add(request_id)
        self.room[self.transmitting[request_id]] -= self.tokens[request_id]

    def end_transfer(self, request_id: str) -> None:
        target = self.transmitting.pop(request_id)
        accepted = self.rng.random() < 0.9
        if accepted:
            assert self.owner[request_id] == self.home[request_id], "owned by two"
            assert request_id not in self.finished
            self.owner[request_id] = target
        else:
            self.reserved.discard(request_id)
            self.room[target] += self.tokens[request_id]
        self.send(target, self.receivers[target].finished(request_id, accepted))

    def check(self) -> None:
        by_sender: dict[str, int] = {}
        for request_id in self.transmitting:
            home = self.home[request_id]
            by_sender[home] = by_sender.get(home, 0) + 1
        assert all(count <= TRANSFERS for count in by_sender.values())
        for name, receiver in self.receivers.items():
            assert sum(target == name for target in self.transmitting.values()) <= TRANSFERS
            # All awarded requests fit, whatever is reserved already.
            assert receiver.pending_tokens <= self.room[name]
        won = [request_id for receiver in self.receivers.values() for request_id in receiver.queue]
        # A withdrawn request can remain in a receiver's queue until the message arrives.
        live = [r for r in won if r not in self.finished]
        assert len(set(live)) == len(live)


@settings(quick, max_examples=150)
@given(
    senders=st.integers(1, 4),
    rooms=st.lists(st.integers(0, 2_000), min_size=1, max_size=6),
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), max_size=25),
    seed=st.integers(0, 2**32),
)
def test_bidding_terminates_with_one_owner_per_request(
    senders: int, rooms: list[int], requests: list[tuple[int, int]], seed: int
) -> None:
    market = Market(senders, rooms, requests, seed)
    market.run()
    assert not market.transmitting
    assert all(not sender.buffered and sender.load == 0 for sender in market.senders.values())
    assert all(not receiver.queue for receiver in market.receivers.values())
    assert all(room >= 0 for room in market.room.values())


@quick
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_choice_among_random_bids_follows_the_paper(drawn: list[tuple[int, int]]) -> None:
    bids = [Bid(f"r{n}", "q", load, start) for n, (load, start) in enumerate(drawn)]
    won = choose(bids)
    assert won is not None
    half = (len(bids) + 1) // 2
    # Fewer than half of the bids have less load; of the kept ones, at most two start earlier.
    assert sum(bid.load < won.load for bid in bids) < half
    kept = sorted(bids, key=lambda bid: bid.load)[:half]
    assert sum(bid.earliest_s < won.earliest_s for bid in kept if bid.load < won.load) < 3
    if len(bids) <= 2:
        assert won.load == min(bid.load for bid in bids)


def test_the_choice_among_bids_example() -> None:
    bids = [
        Bid("slow reply, but first of all", "q", 9, 0.0),
        Bid("late", "q", 1, 9.0),
        Bid("third", "q", 2, 3.0),
        Bid("second", "q", 2, 2.0),
        Bid("first", "q", 3, 1.0),
        Bid("e", "q", 8, 0.0),
        Bid("f", "q", 8, 0.0),
        Bid("g", "q", 8, 0.0),
    ]
    won = choose(bids)
    assert won is not None and won.receiver == "third"
    assert choose([]) is None


def receiver(
    room: int = 10_000, starvation: int = 3, reserved: Callable[[str], bool] = lambda request_id: False
) -> Receiver:
    return Receiver("r", lambda: Space(room, 0), reserved, 100.0, starvation=starvation)


def test_room_reserved_by_a_transfer_is_counted_once() -> None:
    """Blocks count as used once the import is open, and no longer as pending."""
    room, reserved = [1_000], set[str]()
    taker = Receiver("r", lambda: Space(room[0], 1_000 - room[0]), reserved.__contains__)
    taker.on_award(Award("a", "qa", 400, 400))
    taker.on_grant(Grant("a", "qa"))
    assert taker.on_ask(Ask("b", "qb", 601, 601)) is None
    bid = taker.on_ask(Ask("b", "qb", 600, 600))
    assert bid is not None and bid.load == 400
    # The engine has reserved the blocks.
    reserved.add("qa")
    room[0] -= 400
    bid = taker.on_ask(Ask("b", "qb", 600, 600))
    assert bid is not None and bid.load == 400
    assert taker.on_award(Award("b", "qb", 600, 600)) == [("b", Start("r", "qb"))]


def test_a_receiver_whose_load_would_exceed_the_limit_does_not_bid() -> None:
    taker = Receiver("r", lambda: Space(10_000, 500), lambda request_id: False)
    assert taker.on_ask(Ask("a", "q", 100, 100, most_tokens=599)) is None
    assert taker.on_ask(Ask("a", "q", 100, 100, most_tokens=600)) is not None
    # Requests awarded since the bid count.
    taker.on_award(Award("b", "other", 1, 1))
    declined = taker.on_award(Award("a", "q", 100, 100, most_tokens=600))
    assert declined == [("a", Done("r", "q", False))]


def test_bids_for_a_request_count_earlier_awards() -> None:
    """Of two requests offered at once, the second is asked for when the first is awarded."""
    giver = Sender("a")
    takers = {name: Receiver(name, lambda: Space(1_000, 0), lambda request_id: False) for name in "xy"}
    asks = giver.offer("q", 400, "xy", 450)
    assert [ask for _, ask in asks] == [Ask("a", "q", 400, 400, 450)] * 2
    assert giver.offer("p", 300, "xy", 450) == []
    assert giver.buffered == {"q", "p"} and giver.load == 700 and giver.bidding == "q"
    messages = list(asks)
    won: dict[str, str] = {}
    while messages:
        name, message = messages.pop(0)
        if isinstance(message, Ask):
            bid = takers[name].on_ask(message)
            reply = giver.on_bid(bid) if bid is not None else giver.on_no_bid(name, message.request_id)
            messages += reply
        else:
            assert isinstance(message, Award)
            assert takers[name].on_award(message) == [("a", Start(name, message.request_id))]
            won[message.request_id] = name
    assert set(won) == {"q", "p"} and len(set(won.values())) == 2
    assert giver.bidding is None


def test_a_request_waiting_for_its_bidding_can_be_withdrawn_and_offered_again() -> None:
    giver = Sender("a")
    giver.offer("q", 10, ["r"])
    giver.offer("p", 10, ["r"])
    assert giver.withdraw("p") == [] and not giver.has("p")
    assert giver.offer("p", 20, ["r"]) == []
    # The bidding ends without a bid; the next request is asked for once.
    assert giver.close("q") == [("r", Ask("a", "p", 20, 20))]
    assert giver.close("p") == [] and giver.load == 0 and not giver.buffered


def test_the_offers_of_a_sender_are_limited() -> None:
    giver = Sender("a")
    for n in range(OFFERS_MAX + 1):
        giver.offer(str(n), 1, ["r"])
    assert len(giver.buffered) == OFFERS_MAX and not giver.has(str(OFFERS_MAX))


def test_a_receiver_pulls_from_the_fullest_sender_three_at_a_time() -> None:
    taker = receiver()
    starts = [
        *taker.on_award(Award("a", "qa", 10, 10)),
        *taker.on_award(Award("b", "qb", 10, 50)),
        *taker.on_award(Award("c", "qc", 10, 30)),
        *taker.on_award(Award("d", "qd", 10, 20)),
        *taker.on_award(Award("e", "qe", 10, 40)),
    ]
    assert [sender for sender, _ in starts] == ["a", "b", "c"]
    assert taker.queue == ["qb", "qe", "qc", "qd", "qa"]
    assert taker.open_transfers == 3
    taker.on_grant(Grant("a", "qa"))
    assert taker.finished("qa", True) == [("a", Done("r", "qa", True)), ("e", Start("r", "qe"))]


def test_a_sender_transmits_three_at_a_time() -> None:
    giver, taker = Sender("a"), receiver()
    starts = []
    for n in range(4):
        giver.offer(str(n), 10, ["r"])
        (award,) = giver.on_bid(Bid("r", str(n), 0.0, 0.0))
        assert isinstance(award[1], Award)
        starts += taker.on_award(award[1])
    assert [message.request_id for _, message in starts] == ["0", "1", "2"]
    grants = [giver.on_start(start) for _, start in starts if isinstance(start, Start)]
    assert grants == [[("r", Grant("a", str(n)))] for n in range(3)]
    assert giver.on_start(Start("r", "3")) == [("r", Busy("a", "3"))]
    giver.on_done(Done("r", "1", True))
    assert giver.on_start(Start("r", "3")) == [("r", Grant("a", "3"))]
    # A second start during the transfer gets no reply.
    assert giver.on_start(Start("r", "3")) == []


def test_a_bid_states_the_earliest_start() -> None:
    taker = receiver()
    taker.on_award(Award("a", "qa", 500, 10))
    bid = taker.on_ask(Ask("b", "qb", 10, 10))
    assert bid is not None and bid.earliest_s == 5.0
    assert taker.on_ask(Ask("b", "qc", 9_600, 10)) is None
    assert taker.on_award(Award("b", "qc", 9_600, 10)) == [("b", Done("r", "qc", False))]


def test_the_earliest_start_follows_the_measured_transfer_rate() -> None:
    taker = receiver()
    taker.on_award(Award("a", "q", 1_000, 10))

    def earliest_s() -> float:
        bid = taker.on_ask(Ask("b", "p", 1, 1))
        assert bid is not None
        return bid.earliest_s

    assert earliest_s() == 10.0
    # 200 tokens per second: one transfer moves the average only in part.
    taker.transferred(4_000, 20.0)
    assert 5.0 < earliest_s() < 10.0
    for _ in range(100):
        taker.transferred(4_000, 20.0)
    assert earliest_s() == pytest.approx(5.0)
    # A transfer shorter than the clock's resolution.
    taker.transferred(16, 0.0)
    assert 0.0 < earliest_s() < 5.0


def test_a_starving_request_is_sent_next() -> None:
    """A request is skipped for another sender's until it has failed too often; then it is sent next."""
    giver, taker = Sender("a", transfers=1), receiver(starvation=1)
    for request_id in ("mine", "other"):
        giver.offer(request_id, 10, ["r", "x"])
    giver.on_no_bid("x", "mine")
    award, *asks = giver.on_bid(Bid("r", "mine", 0.0, 0.0))
    assert [ask for _, ask in asks] == [Ask("a", "other", 10, 20)] * 2
    giver.on_no_bid("r", "other")
    giver.on_bid(Bid("x", "other", 0.0, 0.0))
    assert giver.on_start(Start("x", "other")) == [("x", Grant("a", "other"))]
    message = award[1]
    assert isinstance(message, Award)
    assert taker.on_award(message) == [("a", Start("r", "mine"))]
    assert giver.on_start(Start("r", "mine")) == [("r", Busy("a", "mine"))]
    assert taker.on_busy(Busy("a", "mine")) == []
    assert taker.attempt() == [("a", Start("r", "mine"))]
    assert taker.on_busy(Busy("a", "mine")) == [("a", Starving("r", "mine"))]
    # It waits: nothing else is attempted.
    assert taker.on_award(Award("b", "later", 10, 99)) == []
    assert giver.on_starving(Starving("r", "mine")) == []
    assert giver.on_done(Done("x", "other", True)) == [("r", Grant("a", "mine"))]
    assert taker.on_grant(Grant("a", "mine"))
    assert taker.attempt() == [("b", Start("r", "later"))]


def test_lost_peers_leave_no_state() -> None:
    giver, taker = Sender("a"), receiver()
    giver.offer("q", 10, ["r", "x"])
    giver.on_bid(Bid("r", "q", 0.0, 0.0))
    assert giver.lost("x") == [("r", Award("a", "q", 10, 10))]
    giver.lost("r")
    assert not giver.buffered
    taker.on_award(Award("a", "q", 10, 10))
    assert taker.lost("a") == [] and taker.queue == []
    # The winner is lost after other receivers were asked: the request stays here.
    giver.offer("p", 10, ["r", "x"])
    giver.on_bid(Bid("r", "p", 0.0, 0.0))
    giver.on_no_bid("x", "p")
    assert giver.lost("r") == [] and not giver.has("p") and giver.load == 0


def test_late_and_unknown_messages_change_nothing() -> None:
    giver, taker = Sender("a"), receiver()
    asks = giver.offer("q", 10, ["r", "x"])
    assert giver.offer("q", 10, ["r"]) == [] and giver.load == 10
    assert giver.on_bid(Bid("stranger", "q", 0.0, 0.0)) == [] == giver.on_no_bid("r", "unknown")
    giver.on_bid(Bid("r", "q", 0.0, 0.0))
    # The bidding ends before the other receiver's reply, which is then ignored.
    (award,) = giver.close("q")
    assert len(asks) == 2 and award == ("r", Award("a", "q", 10, 10))
    assert giver.on_bid(Bid("x", "q", 0.0, 0.0)) == [] == giver.close("q")
    # A receiver that has not won the request, or asks for an unknown one, gets a withdrawal.
    for receiver_name, request_id in (("x", "q"), ("r", "unknown")):
        withdrawn = [(receiver_name, Withdraw("a", request_id))]
        assert giver.on_start(Start(receiver_name, request_id)) == withdrawn
        assert giver.on_starving(Starving(receiver_name, request_id)) == withdrawn
        assert giver.on_done(Done(receiver_name, request_id, True)) == []
    assert giver.withdraw("unknown") == [] and giver.has("q")
    assert taker.on_busy(Busy("a", "unknown")) == []
    assert not taker.on_grant(Grant("a", "unknown"))
    taker.on_award(Award("a", "q", 10, 10))
    assert taker.on_award(Award("a", "q", 10, 10)) == []
    taker.on_grant(Grant("a", "q"))
    # An earlier busy reply, or a message from another sender, does not end the transfer.
    assert taker.on_busy(Busy("a", "q")) == [] == taker.on_withdraw(Withdraw("b", "q"))
    assert taker.queue == ["q"] and taker.open_transfers == 1
    assert taker.attempt() == []


def test_an_offer_without_receivers_is_dropped() -> None:
    giver = Sender("a")
    assert giver.offer("q", 10, ["a"]) == []
    assert giver.load == 0
