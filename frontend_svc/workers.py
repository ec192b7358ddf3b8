"""The links to all member instances, as membership changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frontend_svc.link import HEARTBEAT_S, Link, LinkSink, Loss, LossCause
from tailrace.records import InstanceRecord
from tailrace.security.transport import PLAIN, Transport
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    link: Link
    task: asyncio.Task[None]


class Workers:
    """One Link a member instance. Is the Outbox of everything else."""

    def __init__(
        self,
        instances: Callable[[], Mapping[str, InstanceRecord]],
        hello: worker_pb2.FrontendHello,
        sink: LinkSink,
        transport: Transport = PLAIN,
    ) -> None:
        """`instances` gives the fleet's members whenever asked."""
        self._instances = instances
        self._hello = hello
        self._sink = sink
        self._transport = transport
        self._kept: dict[str, _Kept] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the links until cancelled; then break all streams, and the workers free what they carried.

        Whatever a link or its sink raises unexpectedly comes out of here.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._tick(), name="heartbeats")
                self.refresh()
        finally:
            self._group = None
            self._kept.clear()

    def refresh(self) -> None:
        """Membership has changed: attach to who is new, attach anew to who was restarted."""
        if self._group is None:
            return
        members = self._instances()
        for instance_id, kept in list(self._kept.items()):
            record = members.get(instance_id)
            if record is None:
                # It may still carry streams of ours; when its stream breaks, that is the end of it.
                kept.link.wanted = False
                if not kept.link.attached:
                    self._drop(instance_id)
            elif record.incarnation != kept.link.record.incarnation:
                self._drop(instance_id)
                self._sink.on_process_gone(instance_id)
            else:
                kept.link.wanted = True
                if kept.task.done():
                    self._drop(instance_id)
        for instance_id, record in members.items():
            if instance_id not in self._kept:
                self._keep(record)

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """See Outbox."""
        kept = self._kept.get(instance_id)
        return kept is not None and kept.link.send(message)

    def send_on_wakeup(self, instance_id: str, message: worker_pb2.AttachUp) -> None:
        """Leave a message for an instance that was just lost; it reads it if it was only stopped."""
        kept = self._kept.get(instance_id)
        if kept is not None:
            kept.link.queue_for_wakeup(message)

    def cut(self, instance_id: str, reason: str) -> None:
        """Break the stream to an instance that does not keep to the protocol; it is opened again."""
        kept = self._kept.get(instance_id)
        if kept is not None:
            kept.link.cut(reason)

    def attached(self) -> list[str]:
        """See Outbox."""
        return [instance_id for instance_id, kept in self._kept.items() if kept.link.attached]

    def max_message_bytes(self, instance_id: str) -> int:
        """See Outbox."""
        kept = self._kept.get(instance_id)
        return kept.link.max_message_bytes if kept is not None and kept.link.attached else 0

    def _keep(self, record: InstanceRecord) -> None:
        assert self._group is not None
        link = Link(record, self._hello, self._sink, self._transport)
        task = self._group.create_task(link.run(), name=f"link to {record.instance_id}")
        self._kept[record.instance_id] = _Kept(link, task)

    def _drop(self, instance_id: str) -> None:
        kept = self._kept.pop(instance_id)
        kept.task.cancel()
        if kept.link.attached:
            log.warning("lost %s: it was restarted", instance_id)
            self._sink.on_lost(instance_id, Loss(LossCause.BROKEN, "restarted"))

    async def _tick(self) -> None:
        due_s = time.monotonic() + HEARTBEAT_S
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            now_s = time.monotonic()
            late_s = now_s - due_s
            for kept in list(self._kept.values()):
                kept.link.tick(now_s, late_s)
            due_s = now_s + HEARTBEAT_S
