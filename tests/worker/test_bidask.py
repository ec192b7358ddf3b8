"""Bid-ask between workers over real gRPC, with transfers controlled by the test."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import grpc
import pytest

from migration_svc.servicer import MigrationServicer
from tailrace.bid_ask import Space
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import bidask_pb2
from tailrace.v1.bidask_pb2_grpc import BidAskStub, add_BidAskServicer_to_server
from tailrace.v1.migration_pb2_grpc import add_MigrationServicer_to_server
from tests.counting import failures_of
from tests.migration.scripted_worker import commit
from tests.migration.test_runs import bench
from tests.waiting import WAIT_S
from worker_agent.bidask import coordinator, offer_sender
from worker_agent.bidask.bid_receiver import Won
from worker_agent.bidask.coordinator import BidAskServicer, Coordinator, fetch_over, send_over
from worker_agent.bidask.messages import PeerQueues
from worker_agent.registration import Addressee


@dataclass
class Worker:
    """A worker that has requests, and room for a number of further tokens."""

    name: str
    free: int = 10_000
    load: float = 0.0
    requests: set[str] = field(default_factory=set)
    # Whether blocks are reserved when a fetch begins, as an import does; otherwise when it ends.
    reserves: bool = True
    reserved: set[str] = field(default_factory=set)
    # Number of concurrent fetches, and its maximum.
    fetching: int = 0
    most: int = 0
    fetched: list[str] = field(default_factory=list)


class Market:
    """Workers connected over gRPC; a fetch waits for `hold` and commits if `commits` says so."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.channels = Channels()
        self.workers: dict[str, Worker] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.outcomes: Counter[str] = Counter()
        self.hold = asyncio.Event()
        self.hold.set()
        self.commits: Callable[[Won], bool] = lambda won: True
        self.sending: dict[str, int] = {}
        self.most_sending = 0

    async def add(self, worker: Worker) -> Worker:
        """Serve a worker."""

        async def fetch(won: Won) -> bool:
            worker.fetching += 1
            if worker.reserves:
                worker.reserved.add(won.request_id)
                worker.free -= won.tokens
            worker.most = max(worker.most, worker.fetching)
            self.sending[won.sender] = self.sending.get(won.sender, 0) + 1
            self.most_sending = max(self.most_sending, self.sending[won.sender])
            await self.hold.wait()
            self.sending[won.sender] -= 1
            worker.fetching -= 1
            source = self.workers[won.sender]
            if not self.commits(won) or won.request_id not in source.requests:
                if won.request_id in worker.reserved:
                    worker.reserved.discard(won.request_id)
                    worker.free += won.tokens
                return False
            source.requests.discard(won.request_id)
            worker.requests.add(won.request_id)
            if won.request_id not in worker.reserved:
                worker.free -= won.tokens
            worker.fetched.append(won.request_id)
            return True

        bidding = Coordinator(
            Addressee(worker.name, "1"),
            lambda request_id: request_id in worker.requests,
            lambda: Space(worker.free, round(worker.load)),
            lambda request_id: request_id in worker.reserved or request_id in worker.requests,
            fetch,
            send_over(self.channels),
            self.outcomes,
        )
        servicer = Servicer(add_BidAskServicer_to_server, BidAskServicer(bidding), "tailrace.v1.BidAsk")
        server = await self.stack.enter_async_context(serve_grpc("127.0.0.1:0", [servicer]))
        bidding.address = server.address
        self.stack.push_async_callback(bidding.close)
        self.workers[worker.name], self.coordinators[worker.name] = worker, bidding
        return worker

    async def offer(
        self, source: str, request_id: str, tokens: int, *receivers: str, most_tokens: int | None = None
    ) -> bidask_pb2.OfferReply:
        """Start an auction, as the scheduler does; receivers may be unreachable addresses."""
        stub = BidAskStub(self.channels.get(self.coordinators[source].address, Role.WORKER))
        named = [
            bidask_pb2.Receiver(
                instance_id=name,
                address=self.coordinators[name].address if name in self.coordinators else name,
            )
            for name in receivers
        ]
        return await stub.Offer(
            bidask_pb2.OfferRequest(
                request_id=request_id,
                tokens=tokens,
                receivers=named,
                reason="test",
                most_tokens=most_tokens,
            ),
            timeout=WAIT_S,
        )

    async def wait_idle(self) -> None:
        """Wait until no request is offered or to be fetched anywhere."""
        async with asyncio.timeout(WAIT_S):
            while any(c.on_offer or c.to_fetch for c in self.coordinators.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def market(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Market]:
    """A market without workers, with deadlines that pass in no test, however busy the machine is."""
    for name in ("BID_S", "OFFER_S"):
        monkeypatch.setattr(offer_sender, name, 2 * WAIT_S)
    monkeypatch.setattr(coordinator, "_SEND_S", WAIT_S)
    async with AsyncExitStack() as stack:
        market = Market(stack)
        yield market
    await market.channels.close()


async def test_a_won_request_is_fetched_by_way_of_the_migration_service() -> None:
    async with bench() as b:
        b.worker.script = commit()
        servicer = MigrationServicer(b.runs, b.history, lambda: b.instances)
        served = [Servicer(add_MigrationServicer_to_server, servicer, "tailrace.v1.Migration")]
        async with serve_grpc("127.0.0.1:0", served) as service, asyncio.timeout(WAIT_S):
            addresses: list[str | None] = [service.address]
            fetch = fetch_over("b", b.channels, lambda: addresses[0])
            award = bidask_pb2.Award(tokens=500, from_epoch=3, reason="load", policy="cascade")
            won = Won("r", "a", 500, award, 0.0)
            assert await fetch(won)
            (record,) = b.history.list("r", 0)
            assert (record.epoch, record.reason, record.policy) == (4, "load", "cascade")
            # Not committed, refused, and without a service.
            b.worker.script = []
            assert not await fetch(won)
            assert not await fetch(replace(won, sender="gone"))
            addresses[0] = None
            assert not await fetch(won)


async def test_request_goes_to_a_lightly_loaded_receiver(market: Market) -> None:
    source = await market.add(Worker("s", requests={"r"}))
    for name, load in (("a", 900.0), ("b", 100.0), ("c", 800.0), ("d", 200.0)):
        await market.add(Worker(name, load=load))
    reply = await market.offer("s", "r", 500, "a", "b", "c", "d")
    # Half of the receivers are excluded by load; the first of the others to answer wins.
    assert reply.taker_instance_id in ("b", "d")
    assert market.outcomes == {"taken": 1}
    assert market.workers[reply.taker_instance_id].fetched == ["r"] and not source.requests
    await market.wait_idle()


async def test_request_stays_if_no_receiver_has_room(market: Market) -> None:
    source = await market.add(Worker("s", requests={"r"}))
    await market.add(Worker("a", free=400))
    reply = await market.offer("s", "r", 500, "a")
    assert (reply.taker_instance_id, reply.reason) == ("", "no receiver bids")
    assert source.requests == {"r"}


async def test_unreachable_receivers_do_not_delay_the_auction(market: Market) -> None:
    await market.add(Worker("s", requests={"r"}))
    await market.add(Worker("a", load=5_000.0))
    # These ports refuse connections.
    reply = await market.offer("s", "r", 500, "127.0.0.1:9", "a")
    assert reply.taker_instance_id == "a"


async def test_a_receiver_whose_address_another_worker_has_now_does_not_get_the_request(
    market: Market,
) -> None:
    source = await market.add(Worker("s", requests={"r"}))
    newcomer = await market.add(Worker("new"))
    market.coordinators["old"] = market.coordinators["new"]
    reply = await market.offer("s", "r", 500, "old")
    assert (reply.taker_instance_id, reply.reason) == ("", "no receiver bids")
    assert source.requests == {"r"} and not newcomer.fetched
    stub = BidAskStub(market.channels.get(market.coordinators["new"].address, Role.WORKER))
    award = bidask_pb2.BidAskMessage(
        sender_id="s", sender_address="127.0.0.1:9", request_id="r", receiver_id="old"
    )
    award.award.tokens = 500
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tell(award, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (caught.value.details() or "").startswith("this is new, not old, which had this address before")
    del market.coordinators["old"]
    assert not newcomer.fetched and not market.coordinators["new"].to_fetch


async def test_room_is_counted_once_during_a_fetch(market: Market) -> None:
    """The receiver has room for both; the blocks of the first are reserved when its fetch begins."""
    await market.add(Worker("s", requests={"r"}))
    await market.add(Worker("z", requests={"q"}))
    target = await market.add(Worker("a", free=1_000))
    market.hold.clear()
    first = asyncio.create_task(market.offer("s", "r", 500, "a"))
    async with asyncio.timeout(WAIT_S):
        while not target.fetching:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    second = asyncio.create_task(market.offer("z", "q", 500, "a"))
    async with asyncio.timeout(WAIT_S):
        while target.fetching < 2 and not second.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    market.hold.set()
    assert [reply.taker_instance_id for reply in (await first, await second)] == ["a", "a"]


async def test_receivers_above_the_load_limit_do_not_bid(market: Market) -> None:
    await market.add(Worker("s", requests={"r"}))
    await market.add(Worker("a", load=700.0))
    await market.add(Worker("b", load=900.0))
    reply = await market.offer("s", "r", 500, "a", "b", most_tokens=1_199)
    assert (reply.taker_instance_id, reply.reason) == ("", "no receiver bids")
    reply = await market.offer("s", "r", 500, "a", "b", most_tokens=1_200)
    assert reply.taker_instance_id == "a"


async def test_request_stays_after_a_failed_transfer(market: Market) -> None:
    source = await market.add(Worker("s", requests={"r"}))
    await market.add(Worker("a"))
    market.commits = lambda won: False
    reply = await market.offer("s", "r", 500, "a")
    assert (reply.taker_instance_id, reply.reason) == ("", "it did not move")
    assert source.requests == {"r"}
    market.commits = lambda won: True
    assert (await market.offer("s", "r", 500, "a")).taker_instance_id == "a"


async def test_unknown_request_is_not_offered(market: Market) -> None:
    await market.add(Worker("s"))
    await market.add(Worker("a"))
    assert not (await market.offer("s", "r", 500, "a")).taker_instance_id
    assert market.workers["a"].fetched == []


async def test_receiver_that_never_reports_completion_is_given_up(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    await market.add(Worker("s", requests={"r", "q"}))
    await market.add(Worker("a"))
    await market.add(Worker("b"))
    market.hold.clear()
    with monkeypatch.context() as patch:
        patch.setattr(offer_sender, "OFFER_S", 0.3)
        assert not (await market.offer("s", "r", 500, "a")).taker_instance_id
    # The sender can offer another request.
    market.hold.set()
    assert (await market.offer("s", "q", 500, "b")).taker_instance_id == "b"


async def test_concurrent_offers_keep_one_owner_each_and_few_transfers(market: Market) -> None:
    senders = [await market.add(Worker(f"s{n}", requests={f"r{n}.{k}" for k in range(6)})) for n in range(5)]
    receivers = [await market.add(Worker(f"t{n}", free=6_000)) for n in range(2)]
    names = [receiver.name for receiver in receivers]
    offered = list(itertools.chain(*([(s.name, r) for r in sorted(s.requests)] for s in senders)))
    replies = await asyncio.gather(*(market.offer(s, r, 300, *names) for s, r in offered))
    await market.wait_idle()
    moved = {r for (_, r), reply in zip(offered, replies, strict=True) if reply.taker_instance_id}
    held = list(itertools.chain(*(w.requests for w in market.workers.values())))
    assert sorted(held) == sorted(r for _, r in offered)
    assert moved == {r for w in receivers for r in w.requests}
    # Each has room for twenty of the thirty; if all choose the same one, the rest is declined.
    assert len(moved) >= 20
    # At most three concurrent transfers per receiver and sender, and no more requests than there is room.
    assert max(w.most for w in receivers) <= 3 and market.most_sending <= 3
    assert all(w.free >= 0 for w in receivers)


@pytest.mark.parametrize("error", [ValueError("not HOST:PORT"), RuntimeError("nobody foresaw this")])
async def test_a_peer_to_which_sending_fails_in_any_way_is_lost(error: Exception) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    sent: asyncio.Queue[str] = asyncio.Queue()

    async def send(address: str, message: bidask_pb2.BidAskMessage) -> None:
        if address == "wrong":
            raise error
        sent.put_nowait(address)

    peers = PeerQueues(send, lost.put_nowait)
    before = failures_of("bid-ask messages")
    for address in ("wrong", "right"):
        peers.send(address, address, bidask_pb2.BidAskMessage(request_id="r"))
    async with asyncio.timeout(WAIT_S):
        assert (await lost.get(), await sent.get()) == ("wrong", "right")
    assert failures_of("bid-ask messages") == before + 1
    peers.send("wrong", "now right", bidask_pb2.BidAskMessage(request_id="r"))
    async with asyncio.timeout(WAIT_S):
        assert await sent.get() == "now right"
    await peers.close()
