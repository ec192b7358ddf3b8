"""Bid-ask between instances (CascadeInfer, section 4.4) under the virtual clock.

The state machines are those that workers run (`tailrace.bid_ask`); here is what
`worker_agent/bidask` is there: messages, each with a latency of its own and in order for each pair, the
clock's part of the protocol, and fetching, which is a migration. An instance knows itself exactly, as a
worker does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.events import EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.migration import Migrations
from tailrace.actions import Migrate, Offer
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
    Sender,
    Space,
    Start,
    Starving,
    ToReceiver,
    ToSender,
    Withdraw,
)


@dataclass(frozen=True, slots=True)
class _NoBid:
    """In place of a bid."""

    receiver: str
    request_id: str


_Message = ToReceiver | ToSender | _NoBid


class BiddingListener(Protocol):
    """Who hears of offers."""

    def offer_changed(self, source: Instance) -> None:
        """An offer of one of its requests was made, or is over."""


@dataclass(slots=True)
class _Offered:
    action: Offer
    job: Job
    source: Instance
    # Counted among the migrations that leave the source, until the migration itself is.
    counted: bool = True
    taken: bool = False


class _Party:
    """One instance's two sides."""

    __slots__ = ("attempts", "instance", "receiver", "sender")

    def __init__(self, instance: Instance, receiver: Receiver) -> None:
        self.instance = instance
        self.sender = Sender(instance.instance_id)
        self.receiver = receiver
        # A retry of what senders were too busy for is due.
        self.attempts = False


class Bidding:
    """All offers."""

    def __init__(
        self,
        instances: Sequence[Instance],
        jobs: Mapping[str, Job],
        migrations: Migrations,
        events: EventQueue,
        message_s: float,
        seed: int,
        listener: BiddingListener,
    ) -> None:
        """`jobs`: by request id. `message_s`: what a message takes on average, `seed`: of the differences."""
        self.outcomes: Counter[str] = Counter()
        self._jobs = jobs
        self._migrations = migrations
        self._events = events
        self._message_s = message_s
        self._random = random.Random(f"bid-ask {seed}")
        self._listener = listener
        self._now = 0.0
        self._parties = {i.instance_id: _Party(i, self._receiver_of(i)) for i in instances}
        self._offers: dict[str, _Offered] = {}
        # When the last message of each pair is delivered.
        self._delivered: dict[tuple[str, str], float] = {}

    def offer(self, action: Offer, job: Job, now: float) -> None:
        """A policy wants this; it counts at once, and the source hears of it by a message."""
        party = self._parties.get(action.source_id)
        if (
            party is None
            or job.instance_id != action.source_id
            or job.state is JobState.DONE
            or job.migrating
            or job.on_offer
        ):
            return
        source = party.instance
        offered = _Offered(action, job, source)
        self._offers[action.request_id] = offered
        job.on_offer = True
        source.migrations_out += 1
        self._listener.offer_changed(source)
        self._events.at(now + self._latency_s(), lambda then: self._begin(offered, then))

    def finished(self, job: Job, now: float) -> None:
        """A request is done."""
        if job.on_offer:
            self._withdraw(self._offers[job.request.request_id], now)

    # ---- an offer's life

    def _begin(self, offered: _Offered, now: float) -> None:
        action = offered.action
        if self._offers.get(action.request_id) is not offered:
            return
        self._now = now
        source, job = offered.source, offered.job
        sender = self._parties[action.source_id].sender
        tokens = job.prompt + job.tokens_at(source.begun_boundary(now))
        has_handler = sender.offer(action.request_id, tokens, action.receiver_ids, action.most_tokens)
        if not sender.has(action.request_id):
            self._end(offered)
            return
        self._events.at(now + OFFER_S, lambda then: self._withdraw(offered, then))
        self._post_all(action.source_id, has_handler, now)

    def _withdraw(self, offered: _Offered, now: float) -> None:
        """The request is done, or has been on offer for too long."""
        request_id, name = offered.action.request_id, offered.action.source_id
        if self._offers.get(request_id) is not offered:
            return
        self._now = now
        self._post_all(name, self._parties[name].sender.give_up(request_id), now)
        self._end(offered)

    def _end(self, offered: _Offered) -> None:
        del self._offers[offered.action.request_id]
        offered.job.on_offer = False
        if offered.counted:
            offered.source.migrations_out -= 1
        self.outcomes["taken" if offered.taken else "kept"] += 1
        self._listener.offer_changed(offered.source)

    # ---- messages

    def _latency_s(self) -> float:
        return self._message_s * (0.5 + self._random.random())

    def _post_all(
        self,
        source: str,
        messages: Sequence[tuple[str, ToReceiver]] | Sequence[tuple[str, ToSender]],
        now: float,
    ) -> None:
        for target, message in messages:
            self._post(source, target, message, now)

    def _post(self, source: str, target: str, message: _Message, now: float) -> None:
        pair = (source, target)
        at_s = max(now + self._latency_s(), self._delivered.get(pair, 0.0))
        self._delivered[pair] = at_s
        self._events.at(at_s, lambda then: self._take(target, source, message, then))

    def _take(self, name: str, sender_name: str, message: _Message, now: float) -> None:
        self._now = now
        party = self._parties[name]
        match message:
            case Bid() | _NoBid() | Start() | Starving() | Done():
                self._take_reply(party.sender, message, now)
                return
            case Ask():
                bid = party.receiver.on_ask(message)
                self._post(name, sender_name, bid or _NoBid(name, message.request_id), now)
                return
            case Award():
                messages = party.receiver.on_award(message)
            case Busy():
                messages = party.receiver.on_busy(message)
            case Withdraw():
                messages = party.receiver.on_withdraw(message)
            case Grant():
                self._granted(party, message, now)
                return
        self._post_all(name, messages, now)
        self._retry_later(party, now)

    def _take_reply(
        self, sender: Sender, message: Bid | _NoBid | Start | Starving | Done, now: float
    ) -> None:
        request_id = message.request_id
        offered = self._offers.get(request_id)
        match message:
            case Bid():
                messages = sender.on_bid(message)
            case _NoBid():
                messages = sender.on_no_bid(message.receiver, request_id)
            case Start():
                messages = sender.on_start(message)
            case Starving():
                messages = sender.on_starving(message)
            case Done():
                if offered is not None:
                    offered.taken = message.accepted
                messages = sender.on_done(message)
        self._post_all(sender.name, messages, now)
        if offered is not None and not sender.has(request_id):
            self._end(offered)

    # ---- the receiving side

    def _granted(self, party: _Party, grant: Grant, now: float) -> None:
        receiver, request_id = party.receiver, grant.request_id
        job, offered = self._jobs[request_id], self._offers.get(request_id)
        if not receiver.on_grant(grant):
            self._post(receiver.name, grant.sender, Done(receiver.name, request_id, False), now)
            return
        if offered is None:
            # It was done before the news of its turn came.
            self._post_all(receiver.name, receiver.finished(request_id, False), now)
            return
        action, tokens = offered.action, job.prompt + job.tokens
        if offered.counted:
            offered.counted = False
            offered.source.migrations_out -= 1

        def ended(committed: bool, then: float) -> None:
            self._now = then
            if committed:
                receiver.transferred(tokens, then - now)
            if request_id in receiver.queue:
                messages = receiver.finished(request_id, committed)
            else:
                messages = [(grant.sender, Done(receiver.name, request_id, committed))]
            self._post_all(receiver.name, messages, then)
            self._retry_later(party, then)

        move = Migrate(request_id, action.source_id, receiver.name, action.reason)
        self._migrations.ask(move, job, party.instance, now, ended)

    def _retry_later(self, party: _Party, now: float) -> None:
        """Ask again for what senders were too busy for."""
        receiver = party.receiver
        if party.attempts or receiver.open_transfers >= len(receiver.queue):
            return
        party.attempts = True

        def attempt(then: float) -> None:
            party.attempts = False
            self._now = then
            self._post_all(receiver.name, receiver.attempt(), then)
            self._retry_later(party, then)

        self._events.at(now + ATTEMPT_S, attempt)

    def _receiver_of(self, instance: Instance) -> Receiver:
        size = instance.block_tokens

        def space() -> Space:
            boundary = instance.begun_boundary(self._now)
            used = instance.used_blocks_at(boundary)
            # A block for the request to grow into.
            free = instance.total_blocks - used - 1
            return Space(free * size, used * size + instance.backlog_at(boundary))

        def reserved(request_id: str) -> bool:
            job = self._jobs[request_id]
            if job.instance_id == instance.instance_id:
                return True
            migration = self._migrations.of(job)
            return migration is not None and migration.target is instance and migration.blocks > 0

        return Receiver(instance.instance_id, space, reserved)
