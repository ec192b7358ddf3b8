"""A front end over real connections that delivers exactly once, and refuses adoptions on command."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from tailrace.service.message_stream import MessageStream, StreamBroken, connect_stream
from tailrace.v1 import worker_pb2
from tests.waiting import WAIT_S
from tests.worker.simulated import request_frames

FINISHED, FAILED = 1, 8
AttachStream = MessageStream[worker_pb2.AttachDown]


@dataclass
class Stream:
    """The front end's state of one request."""

    handle: int
    request_id: str
    owner: str
    frames: list[bytes]
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    failed: bool = False
    repeated: int = 0
    stale: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, tokens: int) -> None:
        """Wait until the stream has this many tokens or has ended."""
        async with asyncio.timeout(WAIT_S):
            while len(self.tokens) < tokens and not self.finished:
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> list[int]:
        """Wait for the end and return all tokens."""
        async with asyncio.timeout(WAIT_S):
            while not self.finished:
                self.changed.clear()
                await self.changed.wait()
        return self.tokens


class Attachment:
    """A connection to a worker."""

    def __init__(
        self, stream: AttachStream, hello: worker_pb2.WorkerHello, reader: asyncio.Task[None]
    ) -> None:
        self.stream = stream
        self.hello = hello
        self.reader = reader


class ScriptedFrontEnd:
    """The only arbiter of its streams, as in docs/decisions/0003."""

    def __init__(self, frontend_id: str = "front-end") -> None:
        self.frontend_id = frontend_id
        self.attached: dict[str, Attachment] = {}
        self.streams: dict[int, Stream] = {}
        self.adoptions = 0
        self.utilities: asyncio.Queue[worker_pb2.UtilityResult] = asyncio.Queue()
        self.queries = 0
        # Instances that announced a drain, and (instance, handle) of requests that they returned.
        self.draining: asyncio.Queue[str] = asyncio.Queue()
        self.returned: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        # Those that they rejected.
        self.rejected: asyncio.Queue[worker_pb2.RequestRejected] = asyncio.Queue()
        # If set, every Adopt is refused with this reason.
        self.refuse = ""
        self.silent = False
        self._beating: asyncio.Task[None] | None = None
        self._adopting: set[asyncio.Task[None]] = set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for instance, attachment in list(self.attached.items()):
                if not attachment.stream.closed:
                    await self._try_beat(instance)

    async def _try_beat(self, instance: str) -> None:
        try:
            await self.send(instance, heartbeat=worker_pb2.Heartbeat())
        except StreamBroken:
            # The worker was killed; the reader handles this.
            return

    async def attach(self, address: str) -> str:
        """Attach to a worker and return its ID."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        stream = await connect_stream(address, worker_pb2.AttachDown)
        hello = worker_pb2.FrontendHello(frontend_id=self.frontend_id, incarnation=uuid.uuid4().hex)
        await stream.write(worker_pb2.AttachUp(hello=hello))
        first = await stream.read()
        assert first is not None and first.HasField("hello")
        instance = first.hello.instance_id
        reader = asyncio.create_task(self._read(instance, stream))
        self.attached[instance] = Attachment(stream, first.hello, reader)
        return instance

    async def detach(self, instance: str) -> None:
        """Break the connection."""
        attachment = self.attached.pop(instance)
        attachment.stream.close()
        await asyncio.gather(attachment.reader, return_exceptions=True)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        for adopting in self._adopting:
            adopting.cancel()
        await asyncio.gather(*self._adopting, return_exceptions=True)
        for instance in list(self.attached):
            await self.detach(instance)

    async def send(self, instance: str, **body: object) -> None:
        attachment = self.attached[instance]
        await attachment.stream.write(worker_pb2.AttachUp(**body))  # type: ignore[arg-type]

    async def submit(self, instance: str, prompt: list[int], **sampling: object) -> Stream:
        """Submit a new request."""
        handle = len(self.streams) + 1
        request_id = f"cmpl-{handle}-{uuid.uuid4().hex[:6]}"
        stream = Stream(handle, request_id, instance, request_frames(request_id, prompt, **sampling))
        self.streams[handle] = stream
        await self.resubmit(stream)
        return stream

    async def resubmit(self, stream: Stream) -> None:
        """Submit a stream's request to its owner, to continue after the accepted tokens."""
        submit = worker_pb2.Submit(
            handle=stream.handle,
            request_id=stream.request_id,
            epoch=stream.epoch,
            frames=stream.frames,
            output_token_ids=stream.tokens,
        )
        await self.send(stream.owner, submit=submit)

    async def abort(self, stream: Stream) -> None:
        """End a stream."""
        await self.send(stream.owner, abort=worker_pb2.Abort(handles=[stream.handle]))
        stream.finished = True
        stream.changed.set()

    async def _read(self, instance: str, stream: AttachStream) -> None:
        while (message := await stream.read()) is not None:
            if not self.silent:
                await self._handle(instance, message)

    async def _handle(self, instance: str, message: worker_pb2.AttachDown) -> None:
        match message.WhichOneof("body"):
            case "outputs":
                self._accept(instance, message.outputs)
            case "adopt":
                # It may wait for outputs, and they for an adoption in the other direction.
                adopting = asyncio.create_task(self._adopt(instance, message.adopt))
                self._adopting.add(adopting)
                adopting.add_done_callback(self._adopting.discard)
            case "draining":
                self.draining.put_nowait(instance)
            case "returned":
                back = message.returned
                for handle, epoch in zip(back.handles, back.epochs, strict=True):
                    assert self.streams[handle].epoch == epoch
                    self.returned.put_nowait((instance, handle))
            case "rejected":
                self.rejected.put_nowait(message.rejected)
            case "utility":
                self.utilities.put_nowait(message.utility)
            case "ownership_query":
                self.queries += 1
                query = message.ownership_query
                stream = self.streams[query.handle]
                current = stream.owner == instance and stream.epoch == query.epoch and not stream.finished
                answer = worker_pb2.Ownership(handle=query.handle, epoch=query.epoch, current=current)
                await self.send(instance, ownership=answer)

    def _accept(self, instance: str, outputs: worker_pb2.StepOutputs) -> None:
        at = 0
        for handle, epoch, first, count, flags in zip(
            outputs.handles,
            outputs.epochs,
            outputs.first_indices,
            outputs.counts,
            outputs.flags,
            strict=True,
        ):
            tokens = list(outputs.token_ids[at : at + count])
            at += count
            stream = self.streams[handle]
            if stream.owner != instance or stream.epoch != epoch or stream.finished:
                stream.stale += 1
                continue
            assert first == len(stream.tokens), f"index {first} after {len(stream.tokens)} tokens"
            stream.tokens += tokens
            stream.failed = bool(flags & FAILED)
            stream.finished = bool(flags & (FINISHED | FAILED))
            stream.changed.set()

    async def _delivered(self, stream: Stream, tokens: int) -> None:
        """Wait until the stream has this many tokens, or its owner is gone."""
        if (owner := self.attached.get(stream.owner)) is None:
            return
        until = asyncio.create_task(stream.until(tokens))
        await asyncio.wait({until, owner.reader}, return_when=asyncio.FIRST_COMPLETED)
        until.cancel()

    async def _adopt(self, instance: str, adopt: worker_pb2.Adopt) -> None:
        stream = self.streams[adopt.handle]
        reason = self.refuse
        if not reason and stream.epoch == adopt.from_epoch:
            # The worker flushes outputs before it answers the pause, but on another connection.
            await self._delivered(stream, adopt.next_index)
        if not reason and (stream.finished or stream.epoch != adopt.from_epoch):
            reason = "not live in that epoch"
        if not reason and len(stream.tokens) != adopt.next_index:
            reason = f"{len(stream.tokens)} tokens, not {adopt.next_index}"
        source, old_epoch = stream.owner, stream.epoch
        if not reason:
            stream.owner, stream.epoch = instance, adopt.epoch
            self.adoptions += 1
        reply = worker_pb2.AdoptReply(
            migration_id=adopt.migration_id, handle=adopt.handle, accepted=not reason, reason=reason
        )
        await self.send(instance, adopt_reply=reply)
        if not reason and source in self.attached:
            await self.send(source, release=worker_pb2.Release(handle=adopt.handle, epoch=old_epoch))
