"""InstanceChooser of requests with schedulers that reply, refuse, hang or are absent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from msgspec.structs import replace

from frontend_svc import placement
from frontend_svc.admission import AdmissionState
from frontend_svc.fleet import ModelFleet
from frontend_svc.placement import Chosen, InstanceChooser, NoneChosen, PlacementClient, _PlacementStream
from frontend_svc.settings import Limits, WaitLimits
from frontend_svc.streams import TEXT_GENERATION, Requirements, Stream, StreamTable
from tailrace.cluster import Pool
from tailrace.records import ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.reachability import Reachability
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from tests.frontend.conftest import eventually, open_rig
from tests.frontend.fleet import record
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class AttachedOutbox:
    """Outbox to these instances, which accept every message."""

    def __init__(self, *instance_ids: str) -> None:
        self.instance_ids = list(instance_ids)

    def attached(self) -> list[str]:
        return self.instance_ids

    def max_message_bytes(self, instance_id: str) -> int:
        return 1 << 20 if instance_id in self.instance_ids else 0

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        return instance_id in self.instance_ids


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Scheduler that replies by the function `answer`, or never if it is None, and ends each stream after so
    many replies."""

    def __init__(
        self,
        answer: Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceReply] | None,
        replies_per_stream: int = 1 << 30,
    ) -> None:
        self.answer = answer
        self.replies_per_stream = replies_per_stream
        self.streams = 0
        self.place_requests: list[scheduler_pb2.PlaceRequest] = []
        # Number of requests in each message.
        self.calls: list[int] = []
        self.called, self.open, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.open.set()
        # Called with each message that is not answered.
        self.on_hang: Callable[[], None] = lambda: None

    async def Place(
        self,
        requests: AsyncIterator[scheduler_pb2.PlaceManyRequest],
        context: grpc.aio.ServicerContext[scheduler_pb2.PlaceManyRequest, scheduler_pb2.PlaceManyReply],
    ) -> AsyncIterator[scheduler_pb2.PlaceManyReply]:
        self.streams += 1
        try:
            for _ in range(self.replies_per_stream):
                request = await anext(requests, None)
                if request is None:
                    return
                yield await self.reply(request)
        finally:
            self.ended.set()

    async def reply(self, request: scheduler_pb2.PlaceManyRequest) -> scheduler_pb2.PlaceManyReply:
        self.place_requests += request.requests
        self.calls.append(len(request.requests))
        self.called.set()
        if self.answer is None:
            self.on_hang()
            await asyncio.Event().wait()
            raise AssertionError
        await self.open.wait()
        return scheduler_pb2.PlaceManyReply(replies=[self.answer(each) for each in request.requests])


@asynccontextmanager
async def scheduler(members: StaticMembers, name: str, servicer: Scheduler) -> AsyncIterator[grpc.aio.Server]:
    """Serve a scheduler that is registered in the fleet; the first one leads."""
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    service = ServiceRecord(kind="scheduler", service_id=name, incarnation="1", address=f"127.0.0.1:{port}")
    members.services["scheduler", name] = service
    members.leaders.setdefault("scheduler", service)
    try:
        yield server
    finally:
        await server.stop(None)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Return a scheduler that never replies. A message's time is over once it has the message, and for no
    other one: as everything runs in this process, any time may be too short on a busy machine."""
    timeouts: list[asyncio.Timeout] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        timeouts.append(asyncio.timeout(seconds))
        return timeouts[-1]

    hanging = Scheduler(None)
    hanging.on_hang = lambda: timeouts[-1].reschedule(asyncio.get_running_loop().time())
    monkeypatch.setattr(placement, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    return hanging


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    yield channels
    await channels.close()


def placed_on(instance_id: str) -> Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceReply]:
    return lambda request: scheduler_pb2.PlaceReply(instance_id=instance_id, policy="test")


@pytest.mark.parametrize(
    ("requirements", "capable"),
    [
        (TEXT_GENERATION, {"plain", "adapters"}),
        (Requirements(adapter=True), {"adapters"}),
        (Requirements(generates=False), {"embeds"}),
        (Requirements(generates=False, adapter=True), set()),
    ],
)
async def test_request_goes_to_an_instance_that_meets_its_requirements(
    channels: Channels, requirements: Requirements, capable: set[str]
) -> None:
    members, table = StaticMembers(), StreamTable()
    members.instances = {
        "plain": record("plain", "a:1"),
        "adapters": replace(record("adapters", "a:2"), takes_adapters=True),
        "embeds": replace(record("embeds", "a:3"), pooling=True),
    }
    stream = table.open("r", prompt_tokens=7, max_tokens=9)
    stream.requirements = requirements
    outbox = AttachedOutbox(*members.instances)
    # Without a scheduler the front end itself chooses.
    chosen = await InstanceChooser("f0", ModelFleet(members), outbox, table, channels).choose(
        stream, frozenset()
    )
    assert chosen.instance_id in capable if isinstance(chosen, Chosen) else not capable
    refusing = Scheduler(lambda request: scheduler_pb2.PlaceReply(refusal="none"))
    async with scheduler(members, "s0", refusing):
        await InstanceChooser("f0", ModelFleet(members), outbox, table, channels).choose(stream, frozenset())
    assert set(refusing.place_requests[0].excluded_instance_ids) == members.instances.keys() - capable


async def test_placement_request_has_exact_lengths(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    stream = table.open("r", prompt_tokens=7, max_tokens=9)
    stream.token_ids.extend([1, 2])
    leader = Scheduler(placed_on("b"))
    async with scheduler(members, "s0", leader):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a", "b"), table, channels)
        assert await chooser.choose(stream, frozenset({"z"})) == Chosen("b", "test")
    (request,) = leader.place_requests
    assert (request.request_id, request.frontend_id) == ("r", "f0")
    assert (request.prompt_tokens, request.output_tokens, request.max_tokens) == (7, 2, 9)
    assert list(request.excluded_instance_ids) == ["z"]
    # It has tokens, so it cannot be refused as late.
    assert request.admitted


@pytest.mark.parametrize(
    ("given", "pace_s"), [(0.1, 0.1), (0.0, 0.0), (-1.0, 0.0), (1e9, 0.0), (float("nan"), 0.0)]
)
async def test_the_pace_of_a_policy_is_within_a_readers(
    channels: Channels, given: float, pace_s: float
) -> None:
    members, table = StaticMembers(), StreamTable()
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id="a", policy="p", pace_s=given))
    async with scheduler(members, "s0", leader):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a"), table, channels)
        assert await chooser.choose(table.open("r"), frozenset()) == Chosen("a", "p", pace_s=pace_s)


async def test_only_a_request_never_placed_may_be_refused_as_late(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    new, moved = table.open("new"), table.open("moved")
    table.assign(moved, "a")
    table.orphan(moved)
    late = Scheduler(lambda request: scheduler_pb2.PlaceReply(refusal="too late", final=True))
    async with scheduler(members, "s0", late):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a"), table, channels)
        assert await chooser.choose(new, frozenset()) == NoneChosen("too late", final=True)
        await chooser.choose(moved, frozenset())
    assert [request.admitted for request in late.place_requests] == [False, True]


async def test_requests_that_arrive_during_a_call_are_placed_in_one_batch(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id=f"on-{request.request_id}"))
    leader.open.clear()
    names = [f"r{number}" for number in range(600)]
    async with scheduler(members, "s0", leader):
        chooser = InstanceChooser(
            "f0", ModelFleet(members), AttachedOutbox(*(f"on-{name}" for name in names)), table, channels
        )
        first = asyncio.create_task(chooser.choose(table.open(names[0]), frozenset()))
        await leader.called.wait()
        others = [asyncio.create_task(chooser.choose(table.open(n), frozenset())) for n in names[1:]]
        await asyncio.sleep(0)
        # Its client has disconnected.
        others[3].cancel()
        leader.open.set()
        async with asyncio.timeout(WAIT_S):
            assert (await first) == Chosen("on-r0", "")
            answers = await asyncio.gather(*others, return_exceptions=True)
        for number, answer in enumerate(answers, 1):
            if number != 4:
                assert answer == Chosen(f"on-r{number}", "")
        assert isinstance(answers[3], asyncio.CancelledError)
        await chooser.close()
    assert leader.calls == [1, 512, 87]


async def test_close_completes_pending_placements(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    async with scheduler(members, "s0", Scheduler(None)) as _:
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a"), table, channels)
        waiting = asyncio.create_task(chooser.choose(table.open("r"), frozenset()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await chooser.close()
        async with asyncio.timeout(WAIT_S):
            assert await waiting == Chosen("a", "fallback")


async def test_scheduler_refusal_is_returned(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    refusing = Scheduler(lambda request: scheduler_pb2.PlaceReply(refusal="full"))
    async with scheduler(members, "s0", refusing):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a"), table, channels)
        assert await chooser.choose(table.open("r"), frozenset()) == NoneChosen("full")


async def test_placement_on_an_unattached_instance_is_requested_again(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    stale = Scheduler(
        lambda request: scheduler_pb2.PlaceReply(
            instance_id="a" if "gone" in request.excluded_instance_ids else "gone"
        )
    )
    async with scheduler(members, "s0", stale):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a"), table, channels)
        assert await chooser.choose(table.open("r"), frozenset()) == Chosen("a", "")


async def test_standby_scheduler_is_asked_when_the_leader_hangs(channels: Channels, hung: Scheduler) -> None:
    members, table, standby = StaticMembers(), StreamTable(), Scheduler(placed_on("b"))
    async with scheduler(members, "s0", hung), scheduler(members, "s1", standby):
        chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox("a", "b"), table, channels)
        assert await chooser.choose(table.open("r"), frozenset()) == Chosen("b", "test")
        # The next request does not wait for the hung one.
        assert await chooser.choose(table.open("s"), frozenset()) == Chosen("b", "test")
    assert len(hung.place_requests) == 1


async def test_unreachable_leader_is_asked_once_until_it_serves_again(
    channels: Channels, hung: Scheduler
) -> None:
    """Only one request pays its deadline; from then on it is probed in the background."""
    members = StaticMembers()
    probed, serving = asyncio.Event(), False

    async def check(channel: grpc.aio.Channel) -> bool:
        probed.set()
        return serving

    standby = Scheduler(placed_on("b"))
    async with scheduler(members, "s0", hung), scheduler(members, "s1", standby):
        calls = PlacementClient(
            members, channels, Reachability(channels, Role.SCHEDULER, check, pause_s=0.001)
        )
        for number in range(5):
            probed.clear()
            reply = await calls.place(scheduler_pb2.PlaceRequest(request_id=f"r{number}"))
            assert reply is not None and reply.instance_id == "b"
            async with asyncio.timeout(WAIT_S):
                await probed.wait()
        assert len(hung.place_requests) == 1
        hung.answer, serving = placed_on("a"), True
        async with asyncio.timeout(WAIT_S):
            while len(hung.place_requests) == 1:
                await calls.place(scheduler_pb2.PlaceRequest(request_id="again"))
        await calls.close()


async def test_stream_that_ends_while_it_is_written_to_costs_no_placement(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then grpc.aio gives INTERNAL, whatever the status was."""
    ask, failures = _PlacementStream.ask, 1

    async def fail_first(
        stream: _PlacementStream, message: scheduler_pb2.PlaceManyRequest
    ) -> scheduler_pb2.PlaceManyReply:
        nonlocal failures
        if failures:
            failures -= 1
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core")
        return await ask(stream, message)

    members, only = StaticMembers(), Scheduler(placed_on("a"))
    async with scheduler(members, "s0", only):
        client = PlacementClient(members, channels)
        monkeypatch.setattr(_PlacementStream, "ask", fail_first)
        assert await place(client, "r0") == "a"
        assert only.calls == [1] and not failures
        await client.close()


async def place(client: PlacementClient, request_id: str) -> str:
    """Return the instance that the client gets for a request."""
    reply = await client.place(scheduler_pb2.PlaceRequest(request_id=request_id))
    assert reply is not None
    return reply.instance_id


async def test_placements_share_a_stream(channels: Channels) -> None:
    members = StaticMembers()
    leader = Scheduler(lambda request: scheduler_pb2.PlaceReply(instance_id=f"on-{request.request_id}"))
    async with scheduler(members, "s0", leader):
        client = PlacementClient(members, channels)
        leader.open.clear()
        first = asyncio.create_task(place(client, "r0"))
        await leader.called.wait()
        later = [asyncio.create_task(place(client, f"r{n}")) for n in range(1, 40)]
        await asyncio.sleep(0)
        leader.open.set()
        assert await asyncio.gather(first, *later) == [f"on-r{n}" for n in range(40)]
        assert await place(client, "r40") == "on-r40"
        assert (leader.streams, leader.calls) == (1, [1, 39, 1])
        await client.close()
        async with asyncio.timeout(WAIT_S):
            await leader.ended.wait()


async def test_a_stream_that_has_ended_is_opened_again(channels: Channels) -> None:
    """As after a restart of the scheduler, which then is not taken for one that cannot be reached."""
    members, reachability = StaticMembers(), Reachability(channels, Role.SCHEDULER)
    leader, standby = Scheduler(placed_on("a"), replies_per_stream=2), Scheduler(placed_on("b"))
    async with scheduler(members, "s0", leader), scheduler(members, "s1", standby):
        client = PlacementClient(members, channels, reachability)
        assert [await place(client, f"r{n}") for n in range(6)] == ["a"] * 6
        assert leader.streams == 3 and not standby.calls
        assert reachability.usable(members.services["scheduler", "s0"].address)
        await client.close()


async def test_the_next_scheduler_is_asked_if_a_stream_hangs(
    channels: Channels, hung: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    members, standby = StaticMembers(), Scheduler(placed_on("b"))
    async with scheduler(members, "s0", hung), scheduler(members, "s1", standby):
        client = PlacementClient(members, channels)
        assert [await place(client, f"r{n}") for n in range(3)] == ["b"] * 3
        assert (hung.calls, standby.streams, standby.calls) == ([1], 1, [1, 1, 1])
        address = members.services["scheduler", "s0"].address
        assert f"scheduler at {address}: no reply within {placement._DEADLINE_S:g} s" in caplog.text
        async with asyncio.timeout(WAIT_S):
            await hung.ended.wait()
        await client.close()


async def test_a_new_channel_gets_a_new_stream() -> None:
    """After a certificate has been renewed, the scheduler sees the new one."""
    members, leader = StaticMembers(), Scheduler(placed_on("a"))
    first, second = Channels(), Channels()
    async with scheduler(members, "s0", leader):
        client = PlacementClient(members, first)
        assert [await place(client, "r0"), await place(client, "r1")] == ["a", "a"]
        client._channels = second
        assert [await place(client, "r2"), await place(client, "r3")] == ["a", "a"]
        assert leader.streams == 2
        async with asyncio.timeout(WAIT_S):
            await leader.ended.wait()
        await client.close()
    await first.close()
    await second.close()


async def test_a_scheduler_that_has_left_loses_its_stream(channels: Channels) -> None:
    members = StaticMembers()
    left, stays = Scheduler(placed_on("a")), Scheduler(placed_on("b"))
    async with scheduler(members, "s0", left), scheduler(members, "s1", stays):
        client = PlacementClient(members, channels)
        assert await place(client, "r0") == "a"
        del members.services["scheduler", "s0"]
        members.leaders["scheduler"] = members.services["scheduler", "s1"]
        assert await place(client, "r1") == "b"
        async with asyncio.timeout(WAIT_S):
            await left.ended.wait()
        await client.close()


async def test_fallback_chooses_the_least_loaded_prefill_instance(channels: Channels) -> None:
    members, table = StaticMembers(), StreamTable()
    members.services["scheduler", "dead"] = ServiceRecord(
        kind="scheduler", service_id="dead", incarnation="1", address="127.0.0.1:1"
    )
    members.pools["d"] = Pool.DECODE
    members.draining, members.suspects = frozenset({"x"}), frozenset({"y"})
    outbox = AttachedOutbox("a", "b", "d", "x", "y")
    chooser = InstanceChooser("f0", ModelFleet(members), outbox, table, channels)
    for name, expected in (("r0", "a"), ("r1", "b"), ("r2", "a")):
        stream = table.open(name)
        assert await chooser.choose(stream, frozenset()) == Chosen(expected, "fallback")
        table.assign(stream, expected)
    assert await chooser.choose(table.open("r3"), frozenset({"a", "b"})) == Chosen("d", "fallback")
    outbox.instance_ids = ["x", "y"]
    assert await chooser.choose(table.open("r5"), frozenset()) == Chosen("y", "fallback")
    outbox.instance_ids = ["x"]
    assert isinstance(await chooser.choose(table.open("r4"), frozenset()), NoneChosen)


class NonIterableTable(StreamTable):
    """Stream table that must not be iterated over."""

    def __iter__(self) -> Iterator[Stream]:
        raise AssertionError("the placement iterates over all streams")


async def test_fallback_placement_does_not_iterate_over_streams(channels: Channels) -> None:
    members, table = StaticMembers(), NonIterableTable()
    names = [f"w{number}" for number in range(64)]
    for number in range(10_000):
        table.assign(table.open(f"r{number}"), names[number % 63])
    chooser = InstanceChooser("f0", ModelFleet(members), AttachedOutbox(*names), table, channels)
    assert await chooser.choose(table.open("new"), frozenset()) == Chosen("w63", "fallback")
    # The loss of an instance does not iterate over the streams of others either.
    assert len(table.orphan_all("w0")) == 159
    assert [table.count_owned(name) for name in ("w0", "w1", "w62", "w63")] == [0, 159, 158, 0]


async def test_where_instances_are_started_on_demand_a_request_waits_for_one(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Limits(), waits=WaitLimits(WAIT_S, instance_s=WAIT_S)) as rig:
        asked = Scheduler(lambda request: scheduler_pb2.PlaceReply(refusal="no instance"))
        async with scheduler(rig.members, "s0", asked):
            rig.members.changed()
            # The API server waits for what the first instance says of its engine; so one is asked for.
            await eventually(lambda: asked.place_requests != [])
            assert rig.admission.read() is AdmissionState.OPEN
            worker = await rig.worker("a")
            await rig.front.ready()
            before = len(asked.place_requests)
            await rig.crash(worker)
            del rig.members.instances["a"]
            rig.members.changed()
            await rig.front.add("r")
            await eventually(lambda: len(asked.place_requests) > before + 1)
            assert {each.request_id for each in asked.place_requests[before:]} == {"r"}
            assert rig.admission.read() is AdmissionState.OPEN
            asked.answer = placed_on("b")
            assert (await (await rig.worker("b")).submitted()).request_id == "r"
