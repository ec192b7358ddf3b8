"""Kept answers, case by case: which front end may continue which answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frontend_svc.answers import coordinator
from frontend_svc.answers import store as store_module
from frontend_svc.answers.calls import (
    CLOSE,
    CloseCall,
    NoteCall,
    OpenCall,
    OpenReply,
    parse_event_id,
    parse_run_name,
    run_name,
)
from frontend_svc.answers.peers import Peer, decode_part, encode_part, rendezvous_rank
from frontend_svc.answers.store import (
    AnswerStore,
    AnswerTooLarge,
    Head,
    KeptAnswer,
    LogEntry,
    PartRefusal,
    RemovalReason,
    StoreFull,
)
from tailrace.v1 import answers_pb2
from tailrace.wire.requests import UtilityCall
from tests.frontend.answers_world import (
    KEEP_S,
    NAMES,
    Client,
    FrontEnd,
    Network,
    connect,
    end_call,
    generate,
    run_ready_tasks,
)


class World:
    """Three front ends whose calls arrive when the test delivers them."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.network = Network()
        for name in names:
            self.network.fronts[name] = FrontEnd(self.network, name)

    def shrink(self, name: str, max_bytes: int) -> None:
        """Replace a front end by one with this much memory for answers."""
        self.network.fronts[name] = FrontEnd(self.network, name, max_bytes)

    def __getitem__(self, name: str) -> FrontEnd:
        return self.network.fronts[name]

    async def open(self, name: str, client: Client) -> None:
        opening = asyncio.create_task(connect(self[name], client, self.network))
        await self.deliver_all()
        await opening

    async def tokens(self, name: str, count: int) -> None:
        """Generate tokens for the only stream of a front end."""
        front = self[name]
        (stream,) = front.table
        generate(front, stream, count, self.network)
        await run_ready_tasks()

    async def deliver_all(self) -> None:
        """Deliver all calls."""
        await run_ready_tasks()
        while self.network.pending:
            end_call(self.network, self.network.pending.pop(0))
            await run_ready_tasks()

    async def isolate(self, name: str) -> None:
        self.network.partitioned |= {frozenset((name, other)) for other in NAMES if other != name}
        await self.tick()

    async def heal(self) -> None:
        self.network.partitioned.clear()
        await self.tick()

    async def tick(self) -> None:
        for front in self.network.fronts.values():
            front.coordinator.tick()
        await self.deliver_all()

    async def crash(self, name: str) -> None:
        await self.network.fronts.pop(name).coordinator.close()

    def copy_holder(self, answer_id: str, first: str) -> str:
        """Return the name of the front end that has the copy."""
        return next(
            name
            for name, front in self.network.fronts.items()
            if name != first and front.coordinator.store.get(answer_id) is not None
        )


async def test_token_is_delivered_once_the_second_front_end_has_it() -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 2)
    assert client.events == []
    await world.deliver_all()
    assert client.events == [1, 2]


async def test_nothing_of_an_answer_that_fails_is_held_back() -> None:
    """With n > 1 only one of its streams has failed, and the others show what they make from now on."""
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 2)
    assert client.events == []
    front = world["f0"]
    (stream,) = front.table
    connection = client.connection
    assert connection is not None
    call = NoteCall(answer_id=client.answer_id, run=connection.opened.run, note=b"1")
    note = asyncio.create_task(front.coordinator.add_note(call))
    await run_ready_tasks()
    front.coordinator.stream_failed(stream.handle)
    await run_ready_tasks()
    assert client.events == [1, 2] and note.done()
    await world.deliver_all()
    assert client.events == [1, 2]


async def test_tokens_do_not_wait_for_the_replacement_of_a_lost_copy() -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    lost = world.copy_holder(client.answer_id, "f0")
    await world.crash(lost)
    await world.tokens("f0", 1)
    # The call to the lost front end fails; the whole log is on its way to the third one.
    end_call(world.network, world.network.pending.pop(0))
    await run_ready_tasks()
    assert client.events == [1, 2] and len(world.network.pending) == 1
    await world.tokens("f0", 1)
    assert client.events == [1, 2, 3]
    # It has arrived: from now on new tokens wait for that copy, which has all tokens delivered before.
    end_call(world.network, world.network.pending.pop(0))
    await run_ready_tasks()
    await world.tokens("f0", 1)
    assert client.events == [1, 2, 3]
    await world.deliver_all()
    assert client.events == [1, 2, 3, 4]
    third = world.copy_holder(client.answer_id, "f0")
    await world.tokens("f0", 1)
    await world.crash("f0")
    await world.open(third, client)
    await world.tokens(third, 2)
    await world.deliver_all()
    assert not client.denied and client.events == [1, 2, 3, 4, 6, 7] and client.complete


async def test_isolated_front_end_withholds_unreplicated_tokens() -> None:
    """A client could receive them and then reconnect to the other one, which cannot reach this one."""
    world, client = World(["f0", "f1"]), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.tokens("f0", 1)
    # The first token arrives, but its reply is late; the second one has not been sent.
    end_call(world.network, world.network.pending.pop(0), "silent")
    world.network.partitioned.add(frozenset(("f0", "f1")))
    await run_ready_tasks()
    world["f0"].coordinator.tick()
    assert client.events == [] and world["f0"].uncopied == 1
    # After a long isolation it continues alone: an instance may have no more output that would prove it live.
    world.network.now_s += 6.0
    world["f0"].coordinator.tick()
    assert client.events == [1, 2]


async def test_front_end_that_reaches_instances_continues_without_a_silent_peer() -> None:
    world, client = World(["f0", "f1"]), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    end_call(world.network, world.network.pending.pop(0), "silent")
    world.network.partitioned.add(frozenset(("f0", "f1")))
    await run_ready_tasks()
    assert client.events == []
    await world.tokens("f0", 1)
    assert client.events == [1, 2]


async def test_repeatedly_silent_peer_delays_tokens_for_a_bounded_time() -> None:
    """Probes reach the peer, so it is sent a new copy each time; the larger copies do not arrive."""
    world, client = World(["f0", "f1"]), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 2)
    for _ in range(5):
        assert client.events == []
        end_call(world.network, world.network.pending.pop(0), "silent")
        await run_ready_tasks()
        world.network.now_s += 1.2
        world["f0"].coordinator.tick()
        await run_ready_tasks()
    assert client.events == [1, 2]


async def test_tokens_do_not_wait_for_the_first_copy_of_an_uncopied_answer() -> None:
    world, client = World(["f0"]), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 2)
    assert client.events == [1, 2]
    world.network.fronts["f1"] = FrontEnd(world.network, "f1")
    world["f0"].coordinator.tick()
    await world.tokens("f0", 1)
    assert client.events == [1, 2, 3] and world.network.pending
    assert world["f0"].uncopied == 1
    await world.deliver_all()
    assert world["f0"].uncopied == 0
    await world.tokens("f0", 1)
    assert client.events == [1, 2, 3]
    await world.deliver_all()
    assert client.events == [1, 2, 3, 4]


async def test_answer_continues_uncopied_after_a_failed_call() -> None:
    world, client, other = World(["f0", "f1"]), Client(0, ""), Client(1, "k")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    end_call(world.network, world.network.pending.pop(0), "fails")
    await run_ready_tasks()
    assert client.events == [1]
    await world.tokens("f0", 1)
    await world.tick()
    assert client.events == [1, 2] and not world.network.pending
    # The front end does not count as lost: other answers still get copies there.
    opening = asyncio.create_task(connect(world["f0"], other, world.network))
    await run_ready_tasks()
    assert len(world.network.pending) == 1
    await world.deliver_all()
    await opening
    assert world.copy_holder(other.answer_id, "f0") == "f1"


async def test_tokens_only_the_lost_front_end_had_are_not_regenerated() -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    second = world.copy_holder(client.answer_id, "f0")
    await world.isolate("f0")
    await world.tokens("f0", 1)
    # It continues alone, for a client that it can reach.
    assert client.events == [1, 2]
    await world.crash("f0")
    await world.heal()
    await world.open(second, client)
    await world.tokens(second, 2)
    await world.deliver_all()
    assert client.denied and client.events == [1, 2]


async def test_runs_begun_during_a_partition_are_distinguished() -> None:
    world, client, other = World(), Client(0, "k"), Client(0, "k")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    second = world.copy_holder(client.answer_id, "f0")
    await world.isolate("f0")
    for name, holder in (("f0", client), (second, other)):
        await world.open(name, holder)
        await world.tokens(name, 2)
        await world.deliver_all()
    assert (client.events, other.events) == ([1, 2, 3], [1, 4, 5])
    await world.heal()
    (serving,) = [front.name for front in world.network.fronts.values() if len(front.table)]
    loser = other if serving == "f0" else client
    await world.open(serving, loser)
    for name in world.network.fronts:
        if len(world[name].table):
            await world.tokens(name, 1)
    await world.deliver_all()
    assert loser.denied and loser.events in ([1, 2, 3], [1, 4, 5])


async def test_partitioned_front_end_gives_up_an_answer_taken_over_elsewhere() -> None:
    world, first, later = World(), Client(0, "k"), Client(0, "k")
    await world.open("f0", first)
    await world.tokens("f0", 1)
    await world.deliver_all()
    second = world.copy_holder(first.answer_id, "f0")
    # Frozen: its calls arrive late, and it is unreachable meanwhile.
    await world.tokens("f0", 1)
    late, world.network.pending = world.network.pending, []
    world.network.partitioned |= {frozenset(("f0", other)) for other in NAMES if other != "f0"}
    third = next(name for name in NAMES if name not in ("f0", second))
    await world.open(third, later)
    await world.tokens(third, 1)
    await world.deliver_all()
    assert later.events == [1, 3]
    world.network.partitioned.clear()
    for call in late:
        end_call(world.network, call)
    await run_ready_tasks()
    # Its client has not received the unreplicated token, and its run has ended.
    assert first.events == [1] and first.connection is not None and first.connection.closed
    assert world["f0"].coordinator.store.get(first.answer_id) is None
    await world.tokens(third, 1)
    await world.deliver_all()
    assert later.events == [1, 3, 4]


async def test_latest_connection_gets_the_answer() -> None:
    world, client = World(), Client(0, "k")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    old = client.connection
    assert old is not None
    for name in ("f0", "f1", "f2", "f0"):
        await world.open(name, client)
        await world.tokens(name, 1)
        await world.deliver_all()
        serving = [front.name for front in world.network.fronts.values() if len(front.table)]
        assert serving == [name]
    assert client.events == [1, 2, 3, 4, 5] and old.closed


@pytest.mark.parametrize("fronts", range(2, 7))
@pytest.mark.parametrize("key", ["k", "l", "m", "n"])
async def test_same_key_at_two_front_ends_concurrently_is_one_answer(fronts: int, key: str) -> None:
    world, one, other = World([f"f{number}" for number in range(fronts)]), Client(0, key), Client(0, key)
    await asyncio.gather(world.open("f0", one), world.open("f1", other))
    await world.tick()
    ids = {
        answer.head.answer_id
        for front in world.network.fronts.values()
        for answer in front.coordinator.store
        if answer.served_here
    }
    assert len(ids) == 1


async def test_evicted_answers_are_freed() -> None:
    world = World()
    world.shrink("f0", 20_000)
    for number in range(40):
        client = Client(number, "")
        await world.open("f0", client)
        await world.tokens("f0", 1)
        await world.deliver_all()
        closing = CloseCall(answer_id=client.answer_id, run=1, complete=True, begun=True)
        await world["f0"].coordinator.close_run(closing)
        (stream,) = world["f0"].table
        world["f0"].table.close(stream)
        world["f0"].coordinator.stream_ended(stream.handle)
    await world.tick()
    gc.collect()
    assert len(world["f0"].coordinator.store) < 40
    assert not [each for each in gc.get_objects() if isinstance(each, KeptAnswer) and each.removed]


@pytest.mark.parametrize("fate", ["deliver", "lost", "fails"])
async def test_key_of_a_refused_request_is_free_once_its_run_is_closed(fate: str) -> None:
    world, refused = World(), Client(0, "k")
    await world.open("f0", refused)
    closing = CloseCall(answer_id=refused.answer_id, run=1, complete=False, begun=False)
    closed = asyncio.create_task(world["f0"].coordinator.close_run(closing))
    await run_ready_tasks()
    assert not closed.done()
    while world.network.pending:
        end_call(world.network, world.network.pending.pop(0), fate)
        await run_ready_tasks()
    await closed
    if fate == "deliver":
        with_key = answers_pb2.FindAnswerRequest(tenant="t", idempotency_key="k")
        assert not [name for name in NAMES if world[name].coordinator.handle_find(with_key).answer_id]


async def test_copy_rejected_for_lack_of_room_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(["f0", "f1"])
    world.shrink("f1", 12_000)
    keep, whole = world["f1"].coordinator.handle_keep, 0

    def count_whole_copies(request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        nonlocal whole
        whole += sum(part.HasField("head") for part in request.parts)
        return keep(request)

    monkeypatch.setattr(world["f1"].coordinator, "handle_keep", count_whole_copies)
    clients = [Client(number, "") for number in range(20)]
    for client in clients:
        await world.open("f0", client)
    for _ in range(5):
        for stream in world["f0"].table:
            generate(world["f0"], stream, 1, world.network)
            await world.deliver_all()
    assert all(len(client.events) == 5 for client in clients)
    assert whole == len(clients)


def resume_call(client: Client, last_event_id: str, key: str = "", tenant: str = "t") -> OpenCall:
    return OpenCall(
        tenant=tenant,
        key=key,
        last_event_id=last_event_id,
        path="/p",
        body=b"",
        digest=b"",
        request_name="",
        streams=True,
    )


async def test_only_the_owning_tenant_learns_that_an_answer_has_expired() -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    closing = CloseCall(answer_id=client.answer_id, run=1, complete=True, begun=True)
    await world["f0"].coordinator.close_run(closing)
    await world.deliver_all()
    world.network.now_s += KEEP_S + 1
    await world.tick()
    for name in NAMES:
        for tenant, status in (("t", 410), ("other", 404), ("", 404)):
            call = resume_call(client, f"{client.answer_id}.1.1", tenant=tenant)
            denied = (await world[name].coordinator.open_answer(call)).denied
            assert denied is not None and denied.status == status


async def test_request_that_never_fits_gets_413_and_one_without_room_now_gets_503() -> None:
    world = World(["f0"])
    world.shrink("f0", 20_000)
    large = keyed_call(body=b"x" * 3_000)
    denied = (await world["f0"].coordinator.open_answer(large)).denied
    assert denied is not None and denied.status == 413
    # Without a key it is served but not kept.
    assert await world["f0"].coordinator.open_answer(msgspec.structs.replace(large, key="")) == OpenReply()
    statuses = []
    for number in range(20):
        reply = await world["f0"].coordinator.open_answer(keyed_call(body=b"x" * 1_000, key=f"k{number}"))
        statuses.append(200 if reply.denied is None else reply.denied.status)
    assert set(statuses) == {200, 503}


def keyed_call(body: bytes, key: str = "k") -> OpenCall:
    return msgspec.structs.replace(resume_call(Client(0, ""), "", key), body=body)


@pytest.mark.parametrize(("run", "key"), [(1, "another"), (7, "k")])
async def test_denied_request_leaves_the_answer_unchanged(run: int, key: str) -> None:
    world, client = World(), Client(0, "k")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    for name in NAMES:
        reply = await world[name].coordinator.open_answer(
            resume_call(client, f"{client.answer_id}.{run}.1", key)
        )
        assert reply.denied is not None
    await world.tokens("f0", 1)
    await world.deliver_all()
    assert client.events == [1, 2]


async def test_run_is_closed_even_at_the_limit_of_pending_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    monkeypatch.setattr(coordinator, "_CALLS_MAX", 0)
    monkeypatch.setattr(world["f0"], "reply", lambda frames: None)
    answer = world["f0"].coordinator.store.get(client.answer_id)
    assert answer is not None and answer.client_connected
    closing = CloseCall(answer_id=client.answer_id, run=1, complete=False, begun=True)
    world["f0"].coordinator.handle_call(
        UtilityCall(0, 1, CLOSE, msgspec.Raw(msgspec.msgpack.encode([closing])))
    )
    await run_ready_tasks()
    assert not answer.client_connected


async def test_answer_forgotten_and_restarted_in_one_call_is_kept() -> None:
    world = World()
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    part = encode_part(store.part_from(store.open(head(), 0.0), 0))
    for _ in range(2):
        request = answers_pb2.KeepRequest(frontend_id="f0", parts=[part], forgotten=["a"])
        world["f1"].coordinator.handle_keep(request)
        assert world["f1"].coordinator.store.get("a") is not None


async def test_slow_lookup_does_not_take_the_answer_from_a_later_client() -> None:
    world, client = World(), Client(0, "")
    await world.open("f0", client)
    await world.tokens("f0", 1)
    await world.deliver_all()
    second = world.copy_holder(client.answer_id, "f0")
    its_coordinator, peers = world[second].coordinator, world[second].peers
    # Two clients look for it concurrently, and the later one finds it first.
    gates = [asyncio.Event(), asyncio.Event()]
    find, turn = peers.find, iter(gates)

    async def slow(
        request: answers_pb2.FindAnswerRequest,
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]:
        await next(turn).wait()
        return await find(request)

    peers.find = slow  # type: ignore[method-assign]
    call = OpenCall(
        tenant="t",
        key="",
        last_event_id=f"{client.answer_id}.1.1",
        path="/p",
        body=b"",
        digest=b"",
        request_name="",
        streams=False,
    )
    early, late = (asyncio.create_task(its_coordinator.open_answer(call)) for _ in range(2))
    await run_ready_tasks()
    gates[1].set()
    opened = (await late).opened
    gates[0].set()
    denied = (await early).denied
    assert opened is not None and denied is not None and denied.status == 409
    answer = its_coordinator.store.get(client.answer_id)
    assert answer is not None and answer.run == opened.run


@given(st.lists(st.one_of(st.sampled_from(NAMES), st.integers(0, 5)), max_size=24))
def test_one_key_is_one_answer_for_any_order_of_calls(steps: list[str | int]) -> None:
    asyncio.run(check_one_answer(steps))


async def check_one_answer(steps: list[str | int]) -> None:
    """Run the steps: a name sends the request to that front end, a number delivers a pending call."""
    world, clients = World(), list[Client]()
    opening = []
    for step in steps:
        if isinstance(step, str):
            clients.append(Client(0, "k"))
            opening.append(asyncio.create_task(connect(world[step], clients[-1], world.network)))
        elif world.network.pending:
            pending = world.network.pending.pop(step % len(world.network.pending))
            end_call(world.network, pending)
        await run_ready_tasks()
    await world.deliver_all()
    await asyncio.gather(*opening)
    begun = [client for client in clients if client.answer_id]
    reading = [client for client in begun if client.connection is not None and not client.connection.closed]
    assert len({client.answer_id for client in begun}) <= 1
    assert len(reading) == (1 if begun else 0)
    for front in world.network.fronts.values():
        await front.coordinator.close()


def head(answer_id: str = "a", key: str = "", body: bytes = b"{}", tenant: str = "t") -> Head:
    return Head(answer_id, tenant, key, "/p", body, b"d", "name", 1, True)


def append_tokens(store: AnswerStore, answer: KeptAnswer, *token_ids: int) -> None:
    for token_id in token_ids:
        store.append(answer, LogEntry("p", (token_id,), 0, (b"x" * 10,)), 0.0)


def test_oldest_unread_answer_is_evicted() -> None:
    store = AnswerStore("f0", 20_000, rendezvous_rank)
    old, read = store.open(head("old"), 0.0), store.open(head("read"), 0.0)
    store.end_run(old, 1, True, 1.0)
    for number in range(20):
        new = store.open(head(f"new{number}"), 2.0)
        store.end_run(new, 1, True, 2.0)
    assert store.removal_reason("t", "old") is RemovalReason.NO_ROOM and store.get("read") is read
    assert store.size <= 20_000
    with pytest.raises(StoreFull):
        store.open(head("large", body=b"x" * 3_000), 3.0)


def open_unread(store: AnswerStore, answer_id: str, tenant: str, size: int) -> None:
    answer = store.open(head(answer_id, tenant=tenant, body=b"x" * size), 0.0)
    store.end_run(answer, 1, True, 0.0)


def test_answers_of_a_tenant_are_not_evicted_by_the_large_ones_of_another() -> None:
    store = AnswerStore("f0", 40_000, rendezvous_rank)
    for number in range(5):
        open_unread(store, f"small{number}", "small", 0)
    for number in range(40):
        open_unread(store, f"large{number}", "large", 3_000)
    assert all(store.get(f"small{number}") is not None for number in range(5))
    assert store.get("large39") is not None and store.removal_reason("large", "large0") is not None
    # The tenant that holds most makes room for others, too.
    for number in range(5, 12):
        open_unread(store, f"small{number}", "small", 0)
    assert sum(answer.head.tenant == "small" for answer in store) == 12


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2_000), st.booleans()), max_size=60))
@example(
    # b's are being read, so there is no room for a's last unless it takes it from c, or from itself.
    [("a", 258, False)] * 5 + [("b", 357, True)] * 8 + [("c", 636, False)] * 6 + [("a", 1_482, False)]
)
def test_equal_share_of_the_memory_is_safe_from_others(steps: list[tuple[str, int, bool]]) -> None:
    """A tenant loses answers only to its own, or while it holds more than an equal share."""
    store = AnswerStore("f0", 30_000, rendezvous_rank)
    for number, (tenant, size, read) in enumerate(steps):
        before = {name: [one for one in store if one.head.tenant == name] for name in "abc"}
        held = {name: sum(one.size for one in answers) for name, answers in before.items()}
        try:
            answer = store.open(head(str(number), tenant=tenant, body=b"x" * size), 0.0)
            if not read:
                store.end_run(answer, 1, True, 0.0)
        except StoreFull:
            pass
        for name, answers in before.items():
            if name != tenant and held[name] <= 30_000 / 3:
                assert not any(answer.removed for answer in answers)
    assert store.size == sum(answer.size for answer in store) <= 30_000


def test_answer_that_grows_too_long_is_not_kept() -> None:
    store = AnswerStore("f0", 20_000, rendezvous_rank)
    answer = store.open(head(key="k"), 0.0)
    append_tokens(store, answer, *range(20))
    assert answer.removed and store.find_by_key("t", "k") is None and store.size == 0
    assert store.removal_reason("t", "a") is RemovalReason.NO_ROOM


def test_size_includes_everything_of_variable_length() -> None:
    """A client may give its request a long name, which every entry carries to another front end."""
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    plain_size = store.open(head("plain"), 0.0).size
    answer = store.open(replace(head(key="k" * 255), request_name="n" * 5_000), 0.0)
    assert answer.size > plain_size + 5_000
    assert store.open(head("keyed", key="k" * 255 + "d"), 0.0).size == plain_size + 256
    assert store.open(head("long", body=b"x" * 1_000), 0.0).size > plain_size + 900
    store.append(answer, LogEntry("n" * 5_000, (1,), 0, (b"x",)), 0.0)
    assert answer.size > 10_255


@given(st.text(max_size=20), st.lists(st.integers(0, 200_000)), st.lists(st.binary(max_size=20), max_size=4))
def test_size_of_an_entry_is_at_least_that_of_its_contents(
    part: str, token_ids: list[int], frames: list[bytes]
) -> None:
    """Each token ID counts as four bytes."""
    more = LogEntry(part, token_ids, 0, tuple(frames)).size - LogEntry("", (), 0, ()).size
    assert more >= len(part) + 4 * len(token_ids) + sum(map(len, frames))


def test_answer_size_is_limited_to_64_mib() -> None:
    store = AnswerStore("f0", 1 << 40, rendezvous_rank)
    body = bytes((64 << 20) - store.open(head("empty", body=b""), 0.0).size)
    assert store.open(head("largest", body=body), 0.0).size == 64 << 20
    with pytest.raises(AnswerTooLarge):
        store.open(head("larger", body=body + b"x"), 0.0)


def test_answer_must_fit_into_one_message_however_much_memory_there_is() -> None:
    store = AnswerStore("f0", 1 << 40, rendezvous_rank)
    with pytest.raises(StoreFull):
        store.open(head(body=bytes(64 << 20)), 0.0)
    answer = store.open(head(body=bytes(60 << 20)), 0.0)
    store.append(answer, LogEntry("p", (), 0, (bytes(4 << 20),)), 0.0)
    assert answer.removed


@pytest.mark.parametrize("size", ["of its log", "of its request"])
def test_answer_may_use_an_eighth_of_the_memory(size: str) -> None:
    """The limit is exact to the byte: a front end that sends a copy applies the same rule."""

    def keeps(max_bytes: int) -> bool:
        store = AnswerStore("f0", max_bytes, rendezvous_rank)
        try:
            append_tokens(store, store.open(head(), 0.0), *range(3 if size == "of its log" else 0))
        except StoreFull:
            return False
        return store.get("a") is not None

    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    answer = store.open(head(), 0.0)
    append_tokens(store, answer, *range(3 if size == "of its log" else 0))
    assert keeps(8 * answer.size) and not keeps(8 * answer.size - 8)


def test_number_of_kept_answers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_ANSWERS", 3)
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    for number in range(5):
        store.end_run(store.open(head(f"a{number}"), 0.0), 1, True, 0.0)
        assert len(store) == min(number + 1, 3)
    assert [answer.head.answer_id for answer in store] == ["a2", "a3", "a4"]


def test_removal_reasons_of_the_latest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_REMOVED_MAX", 2)
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    for number in range(4):
        store.remove(store.open(head(f"a{number}"), 0.0), RemovalReason.FAILED)
    known = [store.removal_reason("t", f"a{number}") for number in range(4)]
    assert known == [None, None, RemovalReason.FAILED, RemovalReason.FAILED]


def test_run_numbers_increase_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend_svc.answers.store.secrets.randbelow", lambda below: 0)
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    answer = store.open(head(), 0.0)
    runs = [answer.run]
    for _ in range(3):
        store.begin_run(answer, 0.0)
        runs.append(answer.run)
    assert runs == sorted(set(runs))


def test_latest_runs_are_remembered() -> None:
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    answer = store.open(head(), 0.0)
    for _ in range(1_000):
        last = answer.run
        store.begin_run(answer, 0.0)
    assert len(answer.ended) == 256 and last == max(answer.ended) < answer.run < 1 << 63


def test_answer_expires_after_it_is_unused_for_long() -> None:
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    answer, copy = store.open(head("a", "k"), 0.0), head("b")
    part = AnswerStore("f1", 1 << 20, rendezvous_rank)
    assert isinstance(store.apply_part(part.part_from(part.open(copy, 0.0), 0), 0.0), KeptAnswer)
    assert [each.head.answer_id for each in store.expire(61.0, 60.0)] == ["b"]
    store.end_run(answer, 1, False, 70.0)
    assert store.expire(130.0, 60.0) == [] and store.expire(130.1, 60.0) == [answer]
    assert store.removal_reason("t", "a") is RemovalReason.EXPIRED
    # The key can be used again.
    assert store.open(head("c", "k"), 131.0).head.answer_id == "c"


def test_handed_over_answer_is_claimed_once() -> None:
    local, remote = AnswerStore("f0", 1 << 20, rendezvous_rank), AnswerStore("f1", 1 << 20, rendezvous_rank)
    answer = local.open(head(key="k"), 0.0)
    append_tokens(local, answer, 1, 2)
    part = local.hand_over(answer, "f1", 1.0)
    claimed = remote.claim(part, 1.0)
    assert claimed is not None and (claimed.run, claimed.tokens) == (part.run, 2)
    assert claimed.served_here and claimed.client_connected
    # A duplicate or late reply: a later run may have begun from the first one.
    assert remote.claim(part, 2.0) is None and remote.get("a") is claimed
    # Without the request nothing can be run again; its key may be in use by another answer.
    assert AnswerStore("f2", 1 << 20, rendezvous_rank).claim(replace(part, head=None), 2.0) is None
    other = AnswerStore("f2", 1 << 20, rendezvous_rank)
    other.open(head("b", key="k"), 0.0)
    assert other.claim(part, 2.0) is None


def test_end_of_an_earlier_run_does_not_end_the_current_one() -> None:
    store = AnswerStore("f0", 1 << 20, rendezvous_rank)
    answer = store.open(head(), 0.0)
    store.begin_run(answer, 1.0)
    store.end_run(answer, 1, True, 2.0)
    assert answer.client_connected and not answer.complete
    store.end_run(answer, answer.run, True, 3.0)
    assert not answer.client_connected and answer.complete
    # A client reads it once more and disconnects: it has been delivered completely all the same.
    store.begin_run(answer, 4.0)
    store.end_run(answer, answer.run, False, 5.0)
    assert answer.complete
    store.remove(answer, None)
    store.end_run(answer, answer.run, False, 9.0)
    assert answer.touched_s == 5.0


def test_parts_are_applied_once_and_in_order() -> None:
    local, remote = AnswerStore("f0", 1 << 20, rendezvous_rank), AnswerStore("f1", 1 << 20, rendezvous_rank)
    answer = local.open(head(), 0.0)
    append_tokens(local, answer, 1, 2, 3)
    assert remote.apply_part(local.part_from(answer, 1), 0.0) is PartRefusal.GAP
    first = decode_part(encode_part(local.part_from(answer, 0)))
    for _ in range(2):
        assert isinstance(copy := remote.apply_part(first, 0.0), KeptAnswer)
        assert copy.head == answer.head
        assert (copy.entries, copy.tokens, copy.served_here) == (answer.entries, 3, False)
    kept = remote.get("a")
    assert kept is not None
    append_tokens(local, answer, 4)
    assert isinstance(remote.apply_part(local.part_from(answer, 2, with_head=False), 0.0), KeptAnswer)
    assert [entry.token_ids for entry in kept.entries] == [(1,), (2,), (3,), (4,)]
    assert remote.apply_part(local.part_from(answer, 5, with_head=False), 0.0) is PartRefusal.GAP
    assert remote.size == kept.size


def test_later_run_from_a_shorter_copy_truncates_the_log() -> None:
    local, remote = AnswerStore("f0", 1 << 20, rendezvous_rank), AnswerStore("f1", 1 << 20, rendezvous_rank)
    answer = local.open(head(), 0.0)
    append_tokens(local, answer, 1)
    assert isinstance(remote.apply_part(local.part_from(answer, 0), 0.0), KeptAnswer)
    append_tokens(local, answer, 2, 3)
    taken_over = remote.get("a")
    assert taken_over is not None
    remote.begin_run(taken_over, 0.0)
    append_tokens(remote, taken_over, 7)
    assert isinstance(local.apply_part(remote.part_from(taken_over, 0), 0.0), KeptAnswer)
    assert [entry.token_ids for entry in answer.entries] == [(1,), (7,)]
    assert (answer.run, answer.ended, answer.served_here, answer.tokens) == (taken_over.run, {1: 1}, False, 2)
    # Parts of the earlier run are superseded.
    assert remote.apply_part(local.part_from(answer, 0), 0.0) is PartRefusal.SUPERSEDED


@pytest.mark.parametrize(
    "name",
    ["", ".", "a", "a.", ".1", "a.x", "a.-1", "a.1.", "a.1.x", "a.²", "x" * 200 + ".1.1", f"a.1.{2**64}"],
)
def test_invalid_event_ids_are_rejected(name: str) -> None:
    assert parse_event_id(name) is None


def test_ids() -> None:
    assert parse_run_name(run_name("a", 3)) == ("a", 3)
    assert parse_event_id(f"{run_name('a', 3)}.17") == ("a", 3, 17)
