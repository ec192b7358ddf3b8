"""Whatever front ends do to each other, a client that comes back gets the rest of one and the same answer."""

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
    end_call,
    generate,
    open_at,
    quiet,
)


class Answers(RuleBasedStateMachine):
    """Tokens are drawn anew each time, so that a token which is lost and made again is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.network = Network()
        self.were_apart = False
        self.clients: list[Client] = []
        self.opening: list[asyncio.Task[None]] = []

    def run_until_quiet(self, work: Coroutine[None, None, None] | None = None) -> None:
        async def settle() -> None:
            if work is not None:
                await work
            await quiet()

        self.loop.run_until_complete(settle())

    @initialize()
    def start(self) -> None:
        for name in NAMES:
            self.network.fronts[name] = FrontEnd(self.network, name)

    # ---- what happens

    @rule(name=st.sampled_from(NAMES), keyed=st.booleans())
    def ask(self, name: str, keyed: bool) -> None:
        """A new client."""
        if name in self.network.fronts and len(self.clients) < 4:
            number = len(self.clients)
            client = Client(number, f"key {number}" if keyed else "")
            self.clients.append(client)
            self.open(name, client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), name=st.sampled_from(NAMES), by_key=st.booleans())
    def come_back(self, data: st.DataObject, name: str, by_key: bool) -> None:
        """A client connects again; its old connection may not have been seen to break."""
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
        opening = open_at(self.network.fronts[name], client, self.network)
        self.opening.append(self.loop.create_task(opening))
        self.run_until_quiet()

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), count=st.integers(1, 3))
    def some_tokens(self, data: st.DataObject, count: int) -> None:
        """An instance makes tokens for a stream."""
        live = [
            (front, stream, connection)
            for front in self.network.fronts.values()
            for connection in front.connections.values()
            if (stream := connection.stream) is not None and front.table.is_live(stream)
        ]
        if not live:
            return
        front, stream, _ = data.draw(st.sampled_from(live))
        self.make(front, stream, count)

    def make(self, front: FrontEnd, stream: Stream, count: int) -> None:
        generate(front, stream, count, self.network)
        self.run_until_quiet()

    @precondition(lambda self: self.network.pending)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "lost", "unheard"]))
    def call_ends(self, data: st.DataObject, fate: str) -> None:
        """A call arrives, is lost, or its reply is."""
        pending = data.draw(st.sampled_from(self.network.pending))
        self.network.pending.remove(pending)
        end_call(self.network, pending, fate)
        self.run_until_quiet()

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        """A front end dies and is started again, without its memory."""
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
    def part_or_join(self, pair: tuple[str, str]) -> None:
        """Two front ends lose sight of each other, or find each other again."""
        self.network.apart ^= {frozenset(pair)}
        self.were_apart = True
        self.run_until_quiet()

    @rule()
    def tick(self) -> None:
        """Time passes."""
        self.network.now_s += 0.5

        async def tick() -> None:
            for front in self.network.fronts.values():
                front.coordinator.tick()

        self.run_until_quiet(tick())

    # ---- what always holds

    @invariant()
    def a_client_has_what_its_server_has(self) -> None:
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
    def a_complete_answer_is_whole(self) -> None:
        for client in self.clients:
            if client.complete and not client.denied:
                event("complete")
                if client.seen[0] > 1:
                    event("resumed")
                assert len(client.events) == LENGTH
            if client.denied:
                event("denied")

    @invariant()
    def the_books_add_up(self) -> None:
        for front in self.network.fronts.values():
            store = front.coordinator.store
            assert store.size == sum(answer.size for answer in store)
            for answer in store:
                assert answer.tokens == sum(len(entry.token_ids) for entry in answer.entries)
                assert all(run < answer.run for run in answer.ended)

    @precondition(lambda self: self.clients and not self.network.apart)
    @rule(lost=st.sampled_from(NAMES), to=st.sampled_from(NAMES), midway=st.booleans())
    def one_is_lost(self, lost: str, to: str, midway: bool) -> None:
        """Where front ends had reached each other, its clients get the rest from another one."""
        self.settle_all()
        self.tick()
        self.settle_all()
        front = self.network.fronts[lost]
        clients = [
            connection.client
            for connection in front.connections.values()
            if not connection.closed and connection.client.connection is connection
        ]
        if midway:
            # Nobody else has these, and so no client has.
            self.each_gets_a_token()
        self.crash(lost)
        for client in clients:
            if client.events and not client.complete:
                self.open(to, client)
                self.settle_all()
                # While front ends were apart, another one may have answered the same key: no copy was taken.
                assert not client.denied or (client.key and self.were_apart)
                event("resumed after a loss")

    @rule()
    def flow(self) -> None:
        """Every stream gets a token, and every call arrives."""
        self.each_gets_a_token()
        self.settle_all()

    @rule(name=st.sampled_from(NAMES), crashes=st.booleans())
    def one_goes_on_alone(self, name: str, crashes: bool) -> None:
        """A front end is out of sight of the others for a while."""
        apart = {frozenset((name, other)) for other in NAMES if other != name}
        self.network.apart |= apart
        self.were_apart = True
        self.tick()
        self.each_gets_a_token()
        for client in self.clients if crashes else []:
            if client.key and not client.complete:
                other = next(each for each in NAMES if each != name)
                client.start_again()
                self.open(other, client)
                break
        self.flow()
        if crashes:
            self.crash(name)
        self.network.apart -= apart
        self.tick()

    def each_gets_a_token(self) -> None:
        for front in self.network.fronts.values():
            for connection in list(front.connections.values()):
                if (stream := connection.stream) is not None and front.table.is_live(stream):
                    self.make(front, stream, 1)

    @rule()
    def settle_all(self) -> None:
        """All calls arrive."""
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
