"""A client that reconnects gets the rest of the same answer, whatever happens between front ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from frontend_svc.streams import Stream
from tests.frontend.answers_world import (
    LENGTH,
    NAMES,
    Client,
    FrontEnd,
    Network,
    connect,
    end_call,
    generate,
    run_ready_tasks,
)


class Answers(RuleBasedStateMachine):
    """Generated tokens are unique, so that a token generated in place of a lost one is a different one."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.network = Network()
        self.was_partitioned = False
        self.clients: list[Client] = []
        self.opening: list[asyncio.Task[None]] = []

    def run_until_quiet(self, work: Coroutine[None, None, None] | None = None) -> None:
        async def settle() -> None:
            if work is not None:
                await work
            await run_ready_tasks()

        self.loop.run_until_complete(settle())

    @initialize()
    def start(self) -> None:
        for name in NAMES:
            self.network.fronts[name] = FrontEnd(self.network, name)

    # ---- events

    @rule(name=st.sampled_from(NAMES), keyed=st.booleans())
    def ask(self, name: str, keyed: bool) -> None:
        """Send the request of a new client."""
        if name in self.network.fronts and len(self.clients) < 4:
            number = len(self.clients)
            client = Client(number, f"key {number}" if keyed else "")
            self.clients.append(client)
            self.open(name, client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), name=st.sampled_from(NAMES), by_key=st.booleans())
    def reconnect(self, data: st.DataObject, name: str, by_key: bool) -> None:
        """Reconnect a client; the end of its previous connection may not have been noticed yet."""
        client = data.draw(st.sampled_from(self.clients))
        if name not in self.network.fronts or client.complete or client.denied:
            return
        if by_key and not client.key:
            return
        if by_key or not client.events:
            if not client.key:
                return
            client.start_again()
        self.open(name, client)

    def open(self, name: str, client: Client) -> None:
        opening = connect(self.network.fronts[name], client, self.network)
        self.opening.append(self.loop.create_task(opening))
        self.run_until_quiet()

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), count=st.integers(1, 3))
    def generate_tokens(self, data: st.DataObject, count: int) -> None:
        """Generate tokens for one stream."""
        live = [
            (front, stream, connection)
            for front in self.network.fronts.values()
            for connection in front.connections.values()
            if (stream := connection.stream) is not None and front.table.is_live(stream)
        ]
        if not live:
            return
        front, stream, _ = data.draw(st.sampled_from(live))
        self.generate_for(front, stream, count)

    def generate_for(self, front: FrontEnd, stream: Stream, count: int) -> None:
        generate(front, stream, count, self.network)
        self.run_until_quiet()

    @precondition(lambda self: self.network.pending)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "lost", "reply_lost"]))
    def end_pending_call(self, data: st.DataObject, fate: str) -> None:
        """Deliver a call, lose it, or lose its reply."""
        pending = data.draw(st.sampled_from(self.network.pending))
        self.network.pending.remove(pending)
        end_call(self.network, pending, fate)
        self.run_until_quiet()

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        """Kill a front end and start it again with empty memory."""
        front = self.network.fronts.pop(name, None)
        if front is None:
            return
        for connection in front.connections.values():
            connection.closed = True
        for pending in [each for each in self.network.pending if name in (each.source, each.target)]:
            self.network.pending.remove(pending)
            end_call(self.network, pending, "lost")
        self.run_until_quiet(front.coordinator.close())
        self.network.fronts[name] = FrontEnd(self.network, name)
        self.run_until_quiet()

    @rule(pair=st.sampled_from(list(itertools.combinations(NAMES, 2))))
    def toggle_link(self, pair: tuple[str, str]) -> None:
        """Cut or restore the network between two front ends."""
        self.network.partitioned ^= {frozenset(pair)}
        self.was_partitioned = True
        self.run_until_quiet()

    @rule()
    def tick(self) -> None:
        """Let time pass."""
        self.network.now_s += 0.5

        async def tick() -> None:
            for front in self.network.fronts.values():
                front.coordinator.tick()

        self.run_until_quiet(tick())

    # ---- invariants

    @invariant()
    def clients_match_the_log(self) -> None:
        for front in self.network.fronts.values():
            for connection in front.connections.values():
                client = connection.client
                if connection.closed or client.connection is not connection or connection.tokens == 0:
                    continue
                answer = front.coordinator.store.get(connection.opened.answer_id)
                if answer is None or connection.tokens < connection.opened.skip:
                    continue
                log = [token_id for entry in answer.entries for token_id in entry.token_ids]
                assert client.events == log[: len(client.events)]

    @invariant()
    def complete_answers_are_whole(self) -> None:
        for client in self.clients:
            if client.complete and not client.denied:
                event("complete")
                if client.seen[0] > 1:
                    event("resumed")
                assert len(client.events) == LENGTH
            if client.denied:
                event("denied")

    @invariant()
    def sizes_and_runs_are_consistent(self) -> None:
        for front in self.network.fronts.values():
            store = front.coordinator.store
            assert store.size == sum(answer.size for answer in store)
            for answer in store:
                assert answer.tokens == sum(len(entry.token_ids) for entry in answer.entries)
                assert all(run < answer.run for run in answer.ended)

    @precondition(lambda self: self.clients and not self.network.partitioned)
    @rule(lost=st.sampled_from(NAMES), to=st.sampled_from(NAMES), midway=st.booleans())
    def lose_front_end(self, lost: str, to: str, midway: bool) -> None:
        """Lose a front end whose peers were reachable: its clients get the rest from another one."""
        self.deliver_all()
        self.tick()
        self.deliver_all()
        front = self.network.fronts[lost]
        clients = [
            connection.client
            for connection in front.connections.values()
            if not connection.closed and connection.client.connection is connection
        ]
        if midway:
            # No other front end has these tokens, so no client has received them.
            self.generate_one_each()
        self.crash(lost)
        for client in clients:
            if client.events and not client.complete:
                self.open(to, client)
                self.deliver_all()
                # During a partition another front end may have answered the same key, so there is no copy.
                assert not client.denied or (client.key and self.was_partitioned)
                event("resumed after a loss")

    @rule()
    def run_step(self) -> None:
        """Generate a token for every stream and deliver every call."""
        self.generate_one_each()
        self.deliver_all()

    @rule(name=st.sampled_from(NAMES), crashes=st.booleans())
    def partition_front_end(self, name: str, crashes: bool) -> None:
        """Partition one front end from the others for a while."""
        cut = {frozenset((name, other)) for other in NAMES if other != name}
        self.network.partitioned |= cut
        self.was_partitioned = True
        self.tick()
        self.generate_one_each()
        for client in self.clients if crashes else []:
            if client.key and not client.complete:
                other = next(each for each in NAMES if each != name)
                client.start_again()
                self.open(other, client)
                break
        self.run_step()
        if crashes:
            self.crash(name)
        self.network.partitioned -= cut
        self.tick()

    def generate_one_each(self) -> None:
        for front in self.network.fronts.values():
            for connection in list(front.connections.values()):
                if (stream := connection.stream) is not None and front.table.is_live(stream):
                    self.generate_for(front, stream, 1)

    @rule()
    def deliver_all(self) -> None:
        """Deliver all calls."""
        while self.network.pending:
            end_call(self.network, self.network.pending.pop(0))
            self.run_until_quiet()

    def teardown(self) -> None:
        for front in list(self.network.fronts.values()):
            self.run_until_quiet(front.coordinator.close())
        for task in self.opening:
            task.cancel()
        self.run_until_quiet()
        for task in self.opening:
            if task.done() and not task.cancelled():
                assert task.exception() is None, task.exception()
        self.loop.close()


TestAnswers = Answers.TestCase
TestAnswers.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
