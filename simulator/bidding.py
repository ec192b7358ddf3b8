"""Bid-ask between instances (CascadeInfer, section 4.4) in simulated time.

The state machines are those of the workers (`tailrace.bid_ask`). This module replaces `worker_agent/bidask`:
it delivers messages, each with its own latency and in order per pair, runs the protocol's timers, and fetches
requests by migration. Like a worker, an instance knows its own state exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    """The reply of a receiver that does not bid."""

    receiver: str
    request_id: str


_Message = ToReceiver | ToSender | _NoBid


@dataclass(slots=True)
class _OpenOffer:
    action: Offer
    job: Job
    source: Instance
    # Whether the offer counts among the source's outgoing migrations; the migration itself replaces it.
    counted: bool = True
    taken: bool = False


class _Party:
    """The sending and the receiving side of an instance."""

    __slots__ = ("instance", "receiver", "retry_scheduled", "sender")

    def __init__(self, instance: Instance, receiver: Receiver) -> None:
        self.instance = instance
        self.sender = Sender(instance.instance_id)
        self.receiver = receiver
        # Whether a retry of requests whose senders were busy is scheduled.
        self.retry_scheduled = False


class Bidding:
    """Run the bid-ask protocol between all instances."""

    def __init__(
        self,
        instances: Sequence[Instance],
        jobs: Mapping[str, Job],
        migrations: Migrations,
        events: EventQueue,
        message_s: float,
        seed: int,
        offer_changed: Callable[[Instance], None],
    ) -> None:
        """Start without offers. `jobs` are by request id; `message_s` is the mean latency of a message, which
        varies by `seed`. `offer_changed`: called when a request of the source goes on offer or off it."""
        self.outcomes: Counter[str] = Counter()
        self._jobs = jobs
        self._migrations = migrations
        self._events = events
        self._message_s = message_s
        self._random = random.Random(f"bid-ask {seed}")
        self._offer_changed = offer_changed
        self._now = 0.0
        self._parties = {i.instance_id: _Party(i, self._make_receiver(i)) for i in instances}
        self._offers: dict[str, _OpenOffer] = {}
        # Delivery time of the last message of each pair.
        self._delivered: dict[tuple[str, str], float] = {}

    def offer(self, action: Offer, job: Job, now: float) -> None:
        """Start an offer requested by a policy. It counts at once; the source learns of it by message."""
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
        offered = _OpenOffer(action, job, source)
        self._offers[action.request_id] = offered
        job.on_offer = True
        source.migrations_out += 1
        self._offer_changed(source)
        self._events.schedule(now + self._latency_s(), lambda later: self._begin_offer(offered, later))

    def finished(self, job: Job, now: float) -> None:
        """End the offer of a request that has finished."""
        if job.on_offer:
            self._withdraw(self._offers[job.request.request_id], now)

    # ---- offers

    def _begin_offer(self, offered: _OpenOffer, now: float) -> None:
        action = offered.action
        if self._offers.get(action.request_id) is not offered:
            return
        self._now = now
        source, job = offered.source, offered.job
        sender = self._parties[action.source_id].sender
        tokens = job.prompt + job.tokens_at(source.boundary_at(now))
        has_handler = sender.offer(action.request_id, tokens, action.receiver_ids, action.most_tokens)
        if not sender.has(action.request_id):
            self._end_offer(offered)
            return
        self._events.schedule(now + OFFER_S, lambda later: self._withdraw(offered, later))
        self._send_all(action.source_id, has_handler, now)

    def _withdraw(self, offered: _OpenOffer, now: float) -> None:
        """End the offer of a request that has finished or was on offer for too long."""
        request_id, name = offered.action.request_id, offered.action.source_id
        if self._offers.get(request_id) is not offered:
            return
        self._now = now
        self._send_all(name, self._parties[name].sender.give_up(request_id), now)
        self._end_offer(offered)

    def _end_offer(self, offered: _OpenOffer) -> None:
        del self._offers[offered.action.request_id]
        offered.job.on_offer = False
        if offered.counted:
            offered.source.migrations_out -= 1
        self.outcomes["taken" if offered.taken else "kept"] += 1
        self._offer_changed(offered.source)

    # ---- messages

    def _latency_s(self) -> float:
        return self._message_s * (0.5 + self._random.random())

    def _send_all(
        self,
        source: str,
        messages: Sequence[tuple[str, ToReceiver]] | Sequence[tuple[str, ToSender]],
        now: float,
    ) -> None:
        for target, message in messages:
            self._send(source, target, message, now)

    def _send(self, source: str, target: str, message: _Message, now: float) -> None:
        pair = (source, target)
        at_s = max(now + self._latency_s(), self._delivered.get(pair, 0.0))
        self._delivered[pair] = at_s
        self._events.schedule(at_s, lambda later: self._deliver(target, source, message, later))

    def _deliver(self, name: str, sender_name: str, message: _Message, now: float) -> None:
        self._now = now
        party = self._parties[name]
        match message:
            case Bid() | _NoBid() | Start() | Starving() | Done():
                self._deliver_reply(party.sender, message, now)
                return
            case Ask():
                bid = party.receiver.on_ask(message)
                self._send(name, sender_name, bid or _NoBid(name, message.request_id), now)
                return
            case Award():
                messages = party.receiver.on_award(message)
            case Busy():
                messages = party.receiver.on_busy(message)
            case Withdraw():
                messages = party.receiver.on_withdraw(message)
            case Grant():
                self._on_grant(party, message, now)
                return
        self._send_all(name, messages, now)
        self._retry_later(party, now)

    def _deliver_reply(
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
        self._send_all(sender.name, messages, now)
        if offered is not None and not sender.has(request_id):
            self._end_offer(offered)

    # ---- receiving

    def _on_grant(self, party: _Party, grant: Grant, now: float) -> None:
        receiver, request_id = party.receiver, grant.request_id
        job, offered = self._jobs[request_id], self._offers.get(request_id)
        if not receiver.on_grant(grant):
            self._send(receiver.name, grant.sender, Done(receiver.name, request_id, False), now)
            return
        if offered is None:
            # The offer ended before its grant arrived.
            self._send_all(receiver.name, receiver.finished(request_id, False), now)
            return
        action, tokens = offered.action, job.prompt + job.tokens
        if offered.counted:
            offered.counted = False
            offered.source.migrations_out -= 1

        def on_closed(committed: bool, later: float) -> None:
            self._now = later
            if committed:
                receiver.transferred(tokens, later - now)
            if request_id in receiver.queue:
                messages = receiver.finished(request_id, committed)
            else:
                messages = [(grant.sender, Done(receiver.name, request_id, committed))]
            self._send_all(receiver.name, messages, later)
            self._retry_later(party, later)

        move = Migrate(request_id, action.source_id, receiver.name, action.reason)
        self._migrations.request(move, job, party.instance, now, on_closed)

    def _retry_later(self, party: _Party, now: float) -> None:
        """Schedule a retry of requests whose senders were busy."""
        receiver = party.receiver
        if party.retry_scheduled or receiver.open_transfers >= len(receiver.queue):
            return
        party.retry_scheduled = True

        def attempt(later: float) -> None:
            party.retry_scheduled = False
            self._now = later
            self._send_all(receiver.name, receiver.attempt(), later)
            self._retry_later(party, later)

        self._events.schedule(now + ATTEMPT_S, attempt)

    def _make_receiver(self, instance: Instance) -> Receiver:
        size = instance.block_tokens

        def space() -> Space:
            boundary = instance.boundary_at(self._now)
            used = instance.used_blocks_at(boundary)
            # One block for the request to grow into.
            free = instance.total_blocks - used - 1
            return Space(free * size, used * size + instance.backlog_at(boundary))

        def reserved(request_id: str) -> bool:
            job = self._jobs[request_id]
            if job.instance_id == instance.instance_id:
                return True
            migration = self._migrations.find(job)
            return migration is not None and migration.target is instance and migration.blocks > 0

        return Receiver(instance.instance_id, space, reserved)
