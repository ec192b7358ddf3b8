"""Front ends that keep answers, without API servers and workers, on a network controlled by the test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from prometheus_client import CollectorRegistry

from frontend_svc.admission import Refusal
from frontend_svc.answers.calls import UNLIMITED, OpenCall, OpenedAnswer, run_name
from frontend_svc.answers.coordinator import AnswerCoordinator
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.peers import Peer, PeerCallFailed, PeerSilent, PeerUnreachable, rendezvous_rank
from frontend_svc.answers.store import AnswerStore
from frontend_svc.streams import FINISHED, PREFILL_DONE, Stream, StreamTable
from tailrace.v1 import answers_pb2
from tailrace.wire.outputs import EngineCoreOutput, FinishReason, encode_outputs, read_outputs

NAMES = ("f0", "f1", "f2")
LENGTH = 6
KEEP_S = 60.0


@dataclass(eq=False)
class Pending:
    """A call between two front ends that is in flight."""

    deliver: Callable[[], answers_pb2.KeepReply]
    source: str
    target: str
    result: asyncio.Future[answers_pb2.KeepReply]


class Network:
    """The front ends of a test and the calls in flight between them."""

    def __init__(self) -> None:
        self.fronts: dict[str, FrontEnd] = {}
        self.pending: list[Pending] = []
        # Pairs of front ends that cannot reach each other.
        self.partitioned: set[frozenset[str]] = set()
        self.now_s = 0.0
        self.answers = itertools.count()
        # Every generated token is unique, so that a lost token differs from the one generated in its place.
        self.tokens = itertools.count(1)
        self._random = Random(0)

    def next_run(self, run: int) -> int:
        return run + 1 + self._random.randrange(1 << 32)

    def reaches(self, source: str, target: str) -> bool:
        return target in self.fronts and frozenset((source, target)) not in self.partitioned


class NetworkPeers:
    """peers.Peers over a Network."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._name = name

    def reachable(self) -> list[Peer]:
        return [
            Peer(name, front.incarnation, "")
            for name, front in self._network.fronts.items()
            if name != self._name and self._network.reaches(self._name, name)
        ]

    def choose_replica(self, name: str, prefer: str = "") -> Peer | None:
        peers = self.reachable()
        preferred = next((peer for peer in peers if peer.frontend_id == prefer), None)
        return preferred or max(peers, key=lambda peer: rendezvous_rank(name, peer.frontend_id), default=None)

    async def keep(self, peer: Peer, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        future: asyncio.Future[answers_pb2.KeepReply] = asyncio.get_running_loop().create_future()

        def deliver() -> answers_pb2.KeepReply:
            front = self._network.fronts.get(peer.frontend_id)
            if front is None or front.incarnation != peer.incarnation:
                raise PeerUnreachable
            return front.coordinator.handle_keep(request)

        self._network.pending.append(Pending(deliver, self._name, peer.frontend_id, future))
        return await future

    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]:
        found = [
            (peer, self._network.fronts[peer.frontend_id].coordinator.handle_find(request))
            for peer in self.reachable()
        ]
        # The state may change before the reply arrives.
        await asyncio.sleep(0)
        return [(peer, reply) for peer, reply in found if reply.answer_id or reply.expired]

    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None:
        request = answers_pb2.ClaimAnswerRequest(answer_id=answer_id, frontend_id=self._name)
        reply = self._network.fronts[peer.frontend_id].coordinator.handle_claim(request)
        return reply.part if reply.HasField("part") else None

    def tick(self) -> None:
        """Do nothing: reachability is always up to date."""

    async def close(self) -> None:
        """Do nothing: there are no tasks to cancel."""


@dataclass(eq=False)
class Connection:
    """One HTTP response to one client, as the API server's middleware produces it from a run."""

    opened: OpenedAnswer
    client: Client
    stream: Stream | None = None
    tokens: int = 0
    closed: bool = False

    def deliver(self, token_ids: Sequence[int], last: bool) -> None:
        """Convert an output to events, one per token."""
        for token_id in token_ids:
            self.tokens += 1
            if self.tokens <= self.opened.skip:
                if self.opened.skip_tokens not in (UNLIMITED,) and self.tokens > self.opened.skip_tokens:
                    self.closed = self.client.denied = True
                    return
                continue
            self.client.events.append(token_id)
            self.client.seen = (self.opened.run, self.tokens)
        self.client.complete = self.client.complete or last


@dataclass(eq=False)
class Client:
    """A client that sends a request and reconnects for the rest of its answer."""

    number: int
    key: str
    answer_id: str = ""
    events: list[int] = field(default_factory=list)
    # Run and number of the last event received.
    seen: tuple[int, int] = (0, 0)
    complete: bool = False
    # Whether it was told that the rest is not available.
    denied: bool = False
    connection: Connection | None = None
    # Number of connections it has made.
    attempts: int = 0

    def start_again(self) -> None:
        """Discard all received events, as a client that reconnects with its key alone."""
        self.events.clear()
        self.seen = (0, 0)


class FrontEnd:
    """One front end: its coordinator, its streams, and its API server's connections."""

    _numbers = itertools.count()

    def __init__(self, network: Network, name: str, max_bytes: int = 1 << 20) -> None:
        self.name = name
        self.incarnation = str(next(self._numbers))
        self.peers = NetworkPeers(network, name)
        store = AnswerStore(name, max_bytes, rendezvous_rank, network.next_run)
        self._registry = CollectorRegistry()
        self.coordinator = AnswerCoordinator(
            name,
            KEEP_S,
            store,
            self.peers,
            AnswerMetrics(self._registry),
            lambda: network.now_s,
            lambda: f"a{next(network.answers)}",
        )
        self.table = StreamTable()
        self.connections: dict[str, Connection] = {}
        self.coordinator.bind(self, self.end_request)

    @property
    def uncopied(self) -> float | None:
        """The number of answers without a copy, from the metrics."""
        return self._registry.get_sample_value("tailrace_frontend_answers_uncopied")

    def send_output(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        for output in read_outputs(frames).outputs:
            connection = self.connections.get(output.request_id)
            if connection is not None and not connection.closed:
                assert len(output.new_token_ids) == tokens
                connection.deliver(output.new_token_ids, output.finish_reason is not None)

    def end_request(self, request_id: str, refusal: Refusal) -> None:
        stream = self.table.find(request_id)
        if stream is not None:
            self.table.close(stream)
            self.coordinator.stream_ended(stream.handle)
        connection = self.connections.pop(request_id, None)
        if connection is not None:
            connection.closed = True

    def reply(self, frames: Sequence[bytes]) -> None:
        raise AssertionError("no calls by messages in these tests")

    def begin(self, client: Client, opened: OpenedAnswer, attempt: int) -> None:
        """Run the request in the API server, although its client may have disconnected meanwhile."""
        connection = Connection(opened, client, closed=attempt != client.attempts)
        if not connection.closed:
            client.connection = connection
            client.answer_id = opened.answer_id
        name = f"{opened.answer_id}-{opened.run:08}"
        request = self.coordinator.join_run(run_name(opened.answer_id, opened.run), name)
        if isinstance(request, Refusal):
            connection.closed = True
            return
        self.connections[name] = connection
        if request.progress.finished:
            self.coordinator.deliver(request)
            return
        stream = connection.stream = self.table.open(name)
        self.table.restore(stream, request.progress.token_ids, request.progress.flags, request.progress.model)
        self.coordinator.deliver(request)
        self.coordinator.attach_stream(stream, request)


async def run_ready_tasks() -> None:
    """Yield to the event loop until all tasks that can run have run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def connect(front: FrontEnd, client: Client, network: Network) -> None:
    """Connect the client; the end of its previous connection may not have been noticed yet."""
    client.attempts += 1
    attempt = client.attempts
    if client.connection is not None:
        client.connection.closed = True
    last = f"{client.answer_id}.{client.seen[0]}.{client.seen[1]}" if client.events else ""
    call = OpenCall(
        tenant="t",
        key=client.key,
        last_event_id=last,
        path="/p",
        body=b"%d" % client.number,
        digest=b"%d" % client.number,
        request_name="",
        streams=True,
    )
    reply = await front.coordinator.open_answer(call)
    if network.fronts.get(front.name) is not front:
        return
    if reply.opened is not None:
        front.begin(client, reply.opened, attempt)
    elif attempt == client.attempts:
        assert reply.denied is not None
        client.denied = bool(last)


def generate(front: FrontEnd, stream: Stream, count: int, network: Network) -> None:
    """Generate tokens for a stream, as an instance does."""
    token_ids = [next(network.tokens) for _ in range(min(count, LENGTH - stream.accepted))]
    flags = 0 if stream.accepted else PREFILL_DONE
    front.coordinator.instance_heard()
    stream.token_ids.extend(token_ids)
    finished = stream.accepted >= LENGTH
    output = EngineCoreOutput(
        stream.request_id, token_ids, finish_reason=FinishReason.STOP if finished else None
    )
    if finished:
        flags |= FINISHED
        front.table.close(stream)
    if front.coordinator.is_kept(stream.handle):
        front.coordinator.append_output(stream.handle, encode_outputs([output]), token_ids, flags)


def end_call(network: Network, pending: Pending, fate: str = "deliver") -> None:
    """Complete a call as `fate` says.

    "deliver": it succeeds; "lost": it never arrives; "reply_lost": only its reply is lost; "silent": the
    same, and the caller's deadline expires; "fails": the called front end returns an error.
    """
    if fate == "fails":
        pending.result.set_exception(PeerCallFailed())
        return
    reply = None
    if fate != "lost" and network.reaches(pending.source, pending.target):
        try:
            reply = pending.deliver()
        except PeerUnreachable:
            reply = None
    if pending.result.done():
        return
    if reply is None or fate != "deliver":
        pending.result.set_exception(PeerSilent() if fate == "silent" else PeerUnreachable())
    else:
        pending.result.set_result(reply)
