"""Workers and one front end, connected by in-memory links with delays; links and workers fail on command.

The workers are real except for gRPC and UCX: attach streams, dispatch, exports, imports, simulated engine.
The front end is the arbiter of docs/decisions/0003 and recovers requests of lost workers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from tailrace.perf.transfer_rate import TransferRate
from tailrace.telemetry.tracing import Tracing
from tailrace.v1 import cache_pb2, types_pb2, worker_pb2
from tests.worker.simulated import request_frames
from worker_agent.dispatch import AdmissionControl, AttachStreams, Dispatcher
from worker_agent.engine.base import RequestKey, Submission
from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings
from worker_agent.faults import Faults
from worker_agent.frontends import FrontEnds
from worker_agent.kv.address import KvAddress, KvTransferError, Ticket
from worker_agent.kv.client import Deliver
from worker_agent.kv.server import KvSession
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.migration.export_call import Lease, SourceFailed, SourceLink, SourceLost
from worker_agent.migration.source import Exports, MigrationParts
from worker_agent.migration.target import ImportRefused, Imports
from worker_agent.prefixes import LoanLink, LoanLost, PullParts, Pulls
from worker_agent.registration import Addressee
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequests
from worker_agent.settings import WorkerSettings
from worker_agent.sink import FrontEndSink
from worker_agent.spans import TransferSpans

SETTINGS = WorkerSettings(import_timeout_s=3.0, pause_limit_s=4.0, adopt_timeout_s=5.0)
ENGINE = SimulatedSettings(
    kv_blocks=64,
    block_tokens=4,
    kv_bytes_per_token=16,
    max_model_len=160,
    max_num_seqs=4,
    reasoning_mean_tokens=10,
    answer_mean_tokens=30,
    # About one token every 50 ms.
    speed=0.1,
)
PROMPT = list(range(65, 90))
SAMPLING = {"max_tokens": 60, "ignore_eos": True, "min_tokens": 60}
FINISHED, FAILED = 1, 8
# How late a worker leaves a fault point that is armed: later than most messages arrive.
_HELD_S = 0.3
# A client number that belongs to no attached front end.
_OTHER_CLIENT = 1_000


class Links:
    """Message delays, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def delay(self) -> None:
        """Wait for a message's delay: mostly short, sometimes longer than several steps."""
        await asyncio.sleep(self._random.choice((0.0, 0.0005, 0.002, 0.01, 0.2)))


class MemorySourceLink(SourceLink):
    """SourceLink to a node of the fleet."""

    def __init__(self, links: Links, node: Node | None) -> None:
        self._links = links
        self._lease = Lease()
        self._broken = asyncio.Event()
        if node is None:
            self._broken.set()
        else:
            node.exports.start(self._lease)
            node.leases.append(self)

    async def ask(self, command: worker_pb2.ExportCommand) -> worker_pb2.ExportEvent:
        await self._links.delay()
        self._check()
        self._lease.inbox.command(command)
        event = await self._lease.next_event()
        await self._links.delay()
        self._check()
        if event is None:
            raise SourceLost("closed")
        if event.HasField("failed"):
            raise SourceFailed(event.failed.reason, event.failed.gone)
        return event

    async def failure(self) -> None:
        event = await self._lease.next_event()
        self._check()
        if event is None:
            raise SourceLost("closed")
        raise SourceFailed(event.failed.reason, event.failed.gone)

    async def end(self, committed: bool, reason: str) -> None:
        if not self._broken.is_set():
            await self._links.delay()
        if not self._broken.is_set():
            end = worker_pb2.ExportEnd(committed=committed, reason=reason)
            self._lease.inbox.command(worker_pb2.ExportCommand(end=end))
            while await self._lease.next_event() is not None:
                pass
        self.drop()

    def drop(self) -> None:
        """Break the link, as a failure of the link or of either end does."""
        self._broken.set()
        self._lease.break_off("the link broke")

    def _check(self) -> None:
        if self._broken.is_set():
            raise SourceLost("the link broke")


def _address(number: int) -> KvAddress:
    return KvAddress(b"memory of %d" % number, "none")


class MemoryBlocks:
    """BlockSource over the fleet's memory."""

    def __init__(self, number: int) -> None:
        self.addresses = [_address(number)]
        self.sessions: dict[Ticket, KvSession] = {}

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> KvSession:
        session = KvSession(request_id)
        self.sessions[session.ticket] = session
        return session


class MemoryPuller:
    """BlockPuller over the fleet's memory."""

    def __init__(self, fleet: Fleet, number: int, engine: SimulatedEngine) -> None:
        self._fleet = fleet
        self.addresses = [_address(number)]
        self._engine = engine

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> MemoryTransfer:
        await self._fleet.links.delay()
        node = next(node for node in self._fleet.nodes if node.blocks.addresses == list(sources))
        deliver = partial(self._engine.write_blocks, request_id)
        return MemoryTransfer(self._fleet, node, tickets[0], deliver)


class MemoryTransfer:
    """BlockTransfer over the fleet's memory."""

    def __init__(self, fleet: Fleet, source: Node, ticket: Ticket, deliver: Deliver) -> None:
        self._fleet = fleet
        self._source = source
        self._ticket = ticket
        self._deliver = deliver

    async def close(self) -> None:
        pass

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        source = self._source
        found = source.blocks.sessions.get(self._ticket)
        if found is None or found.closed:
            raise KvTransferError("the export has ended")
        if found.hashes(first_block, len(hashes)) != list(hashes):
            raise KvTransferError("other blocks")
        if not hashes:
            return 0
        staging = source.engine.staging(len(hashes))
        with found.reading():
            checksums = await source.engine.read_blocks(found.request_id, first_block, len(hashes), staging)
        await self._fleet.links.delay()
        if source.dead:
            raise KvTransferError("the source died")
        await self._deliver(first_block, len(hashes), staging, checksums)
        return len(hashes) * 64


def _refuse_loan(address: str, request: cache_pb2.LendRequest, seconds: float) -> LoanLink:
    raise LoanLost("no loans in this fleet")


class FleetFaults(Faults):
    """Fault points at which the fleet may have something happen."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    async def hold(self, point: str) -> None:
        await self._fleet.reached(point)


class Node:
    """One worker."""

    def __init__(self, fleet: Fleet, number: int, settings: SimulatedSettings) -> None:
        self.number = number
        self.dead = False
        self.front_ends, self.blocks = FrontEnds(), MemoryBlocks(number)
        self.running = RunningRequests()
        self.metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        self.engine = SimulatedEngine(settings, clock=asyncio.get_running_loop())
        self.leases: list[MemorySourceLink] = []
        self.incoming = TransferRate()
        self.events = PhaseEvents()
        self._fleet = fleet

    async def start(self) -> None:
        sink = FrontEndSink(
            self.front_ends, self.running, self.events, self.metrics, lambda reason: None, lambda key: None
        )
        info = await self.engine.start(sink)
        faults = self.faults = FleetFaults(self._fleet)
        spans = TransferSpans(Tracing(None), str(self.number))
        puller = MemoryPuller(self._fleet, self.number, self.engine)
        pulls = Pulls(
            PullParts(
                engine=self.engine,
                shape=info.kv_shape,
                puller=puller,
                connect=_refuse_loan,
                metrics=self.metrics,
                faults=faults,
                spans=spans,
                incoming=self.incoming,
                timeout_s=SETTINGS.pull_timeout_s,
            )
        )
        admission = AdmissionControl(pulls.submit, self.front_ends, self.running, self.metrics, 1000)
        own = Addressee(str(self.number), "1")
        parts = MigrationParts(
            own,
            self.engine,
            info,
            self.blocks,
            puller,
            self.front_ends,
            self.running,
            self.events,
            self.metrics,
            faults,
            spans,
            SETTINGS,
            admission.submit,
            incoming=self.incoming,
        )
        self.exports = Exports(parts)
        self.imports = Imports(
            parts,
            lambda address, seconds: MemorySourceLink(self._fleet.links, self._fleet.alive(int(address))),
        )
        dispatch = Dispatcher(
            self.engine,
            admission,
            self.exports,
            self.imports,
            pulls,
            self.running,
            self.events,
            self.metrics,
        )
        self.front_ends.on_gone(dispatch.front_end_gone)
        hello = worker_pb2.WorkerHello(instance_id=str(self.number))
        self.streams = AttachStreams(self.front_ends, dispatch, hello)

    async def die(self) -> None:
        """Kill the worker: none of its messages arrives any more."""
        self.dead = True
        for lease in self.leases:
            lease.drop()
        self._fleet.front_end.lose(self.number)
        await self.exports.close()
        await self.imports.close()
        await self.engine.stop()


@dataclass
class Attachment:
    """The front end's side of an attach stream."""

    served: asyncio.Task[None]
    up: asyncio.Queue[worker_pb2.AttachUp] = field(default_factory=asyncio.Queue)
    broken: bool = False


class Down:
    """The direction to the front end, without flow control."""

    unsent_bytes = 0
    received_s = 0.0

    def __init__(self) -> None:
        self.messages: asyncio.Queue[worker_pb2.AttachDown] = asyncio.Queue()

    def send(self, message: worker_pb2.AttachDown) -> None:
        self.messages.put_nowait(message)

    def stalled_s(self, now_s: float) -> float:
        return 0.0


class FrontEnd:
    """The arbiter of one request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.attached: dict[int, Attachment] = {}
        self.request_id = "r"
        self.frames = request_frames(self.request_id, PROMPT, **SAMPLING)
        self.tokens: list[int] = []
        self.epoch = 0
        self.owner: int | None = None
        self.live = True
        self.refuse_next = False
        self.mute_next_query = False
        self.done = asyncio.Event()

    def attach(self, node: Node) -> None:
        async def messages() -> AsyncIterator[worker_pb2.AttachUp]:
            hello = worker_pb2.FrontendHello(frontend_id="fe", incarnation="1")
            yield worker_pb2.AttachUp(hello=hello)
            while True:
                message = await attachment.up.get()
                await self._fleet.links.delay()
                yield message

        down = Down()

        async def deliver() -> None:
            while True:
                message = await down.messages.get()
                await self._fleet.links.delay()
                if not attachment.broken and not node.dead:
                    self._handle(node.number, message)

        async def serve() -> None:
            delivering = asyncio.create_task(deliver())
            try:
                await node.streams.serve(messages(), down)
            finally:
                delivering.cancel()

        attachment = Attachment(asyncio.create_task(serve()))
        self.attached[node.number] = attachment
        if self.owner is None and self.live:
            self._place()

    def lose(self, number: int) -> None:
        """Handle a broken attach stream: place the request elsewhere if the worker owned it."""
        attachment = self.attached.pop(number, None)
        if attachment is None:
            return
        attachment.broken = True
        attachment.served.cancel()
        self._fleet.ending.append(attachment.served)
        if self.owner == number and self.live:
            self.epoch += 1
            self._place()

    def send(self, number: int, **body: object) -> bool:
        attachment = self.attached.get(number)
        if attachment is None:
            return False
        attachment.up.put_nowait(worker_pb2.AttachUp(**body))  # type: ignore[arg-type]
        return True

    def abort(self) -> None:
        """Abort the request, as when its user disconnects."""
        self._end()
        if self.owner is not None:
            self.send(self.owner, abort=worker_pb2.Abort(handles=[1]))

    def hand_over(self, number: int) -> None:
        """Accept a target of which no other part of the fleet knows: it runs the request from here on."""
        assert self.owner is not None
        self.send(self.owner, release=worker_pb2.Release(handle=1, epoch=self.epoch))
        self.epoch += 1
        self._place(number)

    def _place(self, number: int | None = None) -> None:
        self.owner = min(self.attached, default=None) if number is None else number
        if self.owner is not None:
            submit = worker_pb2.Submit(
                handle=1,
                request_id=self.request_id,
                epoch=self.epoch,
                frames=self.frames,
                output_token_ids=self.tokens,
            )
            self.send(self.owner, submit=submit)

    def _end(self) -> None:
        self.live = False
        self.done.set()

    def _handle(self, number: int, message: worker_pb2.AttachDown) -> None:
        match message.WhichOneof("body"):
            case "outputs":
                self._accept(number, message.outputs)
            case "adopt":
                self._fleet.spawn(self._adopt(number, self.attached[number], message.adopt))
            case "ownership_query" if self.mute_next_query:
                self.mute_next_query = False
            case "ownership_query":
                epoch = message.ownership_query.epoch
                current = self.live and self.owner == number and self.epoch == epoch
                self.send(number, ownership=worker_pb2.Ownership(handle=1, epoch=epoch, current=current))

    def _accept(self, number: int, outputs: worker_pb2.StepOutputs) -> None:
        if not self.live or self.owner != number or outputs.epochs[0] != self.epoch:
            return
        assert outputs.first_indices[0] == len(self.tokens), "a token is lost or repeated"
        self.tokens += outputs.token_ids
        if outputs.flags[0] & FAILED:
            self.epoch += 1
            self._place()
        elif outputs.flags[0] & FINISHED:
            self._end()

    async def _adopt(self, number: int, requester: Attachment, adopt: worker_pb2.Adopt) -> None:
        for _ in range(20):
            if len(self.tokens) >= adopt.next_index or not self.live or self.epoch != adopt.from_epoch:
                break
            await asyncio.sleep(0.1)
        if self.attached.get(number) is not requester:
            return
        accepted = (
            self.live
            and not self.refuse_next
            and self.owner is not None
            and self.epoch == adopt.from_epoch
            and len(self.tokens) == adopt.next_index
        )
        self.refuse_next = False
        source, old = self.owner, self.epoch
        if accepted:
            self.owner, self.epoch = number, adopt.epoch
            self._fleet.commits += 1
        reply = worker_pb2.AdoptReply(
            migration_id=adopt.migration_id, handle=1, accepted=accepted, reason="" if accepted else "no"
        )
        self.send(number, adopt_reply=reply)
        if accepted and source is not None:
            self.send(source, release=worker_pb2.Release(handle=1, epoch=old))


class Fleet:
    """Three workers and the front end."""

    def __init__(self, seed: int, engines: Mapping[int, SimulatedSettings] = MappingProxyType({})) -> None:
        """`engines`: settings of workers that differ from the others, by number."""
        self.links = Links(seed)
        self._engines = engines
        self.front_end = FrontEnd(self)
        self.nodes: list[Node] = []
        self.commits = 0
        self.ending: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._migrations = 0
        self._other_requests = 0
        # What happens when any worker next reaches a fault point.
        self._armed: dict[str, Callable[[], Coroutine[None, None, None]]] = {}

    async def start(self, count: int = 3) -> None:
        for number in range(count):
            self.nodes.append(self._node(number))
            await self.nodes[-1].start()
        for node in self.nodes:
            self.front_end.attach(node)

    def _node(self, number: int) -> Node:
        return Node(self, number, self._engines.get(number, ENGINE))

    def alive(self, number: int) -> Node | None:
        node = self.nodes[number]
        return None if node.dead else node

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def arm(self, point: str, action: Callable[[], Coroutine[None, None, None]]) -> None:
        """Have the action happen when any worker next reaches this fault point, which it then leaves late."""
        self._armed[point] = action

    async def reached(self, point: str) -> None:
        """Handle a worker that has reached a fault point."""
        action = self._armed.pop(point, None)
        if action is not None:
            self.spawn(action())
            await asyncio.sleep(_HELD_S)

    def migrate(self, target: int, mode: worker_pb2.CopyMode.ValueType, room_wait_s: float = 0.0) -> None:
        """Start a migration from the request's current owner, as the migration service does."""
        source, node = self.front_end.owner, self.nodes[target]
        if source is None or source == target:
            return
        self._migrations += 1
        request = worker_pb2.ImportRequest(
            migration_id=f"m{self._migrations}",
            request_id=self.front_end.request_id,
            source_instance_id=str(source),
            source_address=str(source),
            target_instance_id=str(target),
            from_epoch=self.front_end.epoch,
            epoch=self.front_end.epoch + 1,
            mode=mode,
            stop_threshold_blocks=1,
            room_wait_s=room_wait_s,
        )
        try:
            node.imports.start(request)
        except ImportRefused:
            return

    def crowd(self, number: int) -> None:
        """Fill every slot of a node with requests of another client, for about two seconds."""
        for _ in range(ENGINE.max_num_seqs):
            self._other_requests += 1
            request_id = f"stranger-{self._other_requests}"
            frames = request_frames(request_id, PROMPT, max_tokens=40, ignore_eos=True, min_tokens=40)
            key = RequestKey(_OTHER_CLIENT, self._other_requests)
            self.nodes[number].engine.submit(Submission(key, request_id, 0, frames))

    async def cancel(self, target: int) -> None:
        await self.nodes[target].imports.cancel(f"m{self._migrations}")

    async def restart(self, number: int) -> None:
        """Kill a worker and start a new one with the same name."""
        await self.nodes[number].die()
        self.nodes[number] = self._node(number)
        await self.nodes[number].start()
        self.front_end.attach(self.nodes[number])

    async def reattach(self, number: int) -> None:
        """Break the attach stream and open it again."""
        self.front_end.lose(number)
        await self.links.delay()
        if not self.nodes[number].dead:
            self.front_end.attach(self.nodes[number])

    def break_exports(self, number: int) -> None:
        for lease in self.nodes[number].leases:
            lease.drop()

    async def settle(self) -> None:
        """Wait for the end of the stream and check that no worker has anything left of it."""
        async with asyncio.timeout(300):
            await self.front_end.done.wait()
            await asyncio.sleep(60)
        await asyncio.gather(*self._tasks)
        for node in self.nodes:
            stats = node.engine.stats()
            assert stats.requests == [], f"node {node.number} still runs {stats.requests}"
            assert stats.kv_blocks_used == 0, f"node {node.number} holds blocks"
            assert len(node.imports) == len(node.exports) == 0
            assert all(session.closed for session in node.blocks.sessions.values())
            assert len(node.running) == 0
            assert node.engine.stats().kv_blocks_total > 0

    async def close(self) -> None:
        for number in list(self.front_end.attached):
            self.front_end.lose(number)
        await asyncio.gather(*self.ending, return_exceptions=True)
        for node in self.nodes:
            await node.engine.stop()


MODES = (worker_pb2.COPY_MODE_PRE_COPY, worker_pb2.COPY_MODE_STOP_AND_COPY)
ABORTED = types_pb2.MIGRATION_STATE_ABORTED
