"""The commit of a migration on the target's side: the request to the front end, and its reply."""

from __future__ import annotations

import asyncio
import enum

from tailrace.v1 import worker_pb2
from worker_agent.frontends import FrontEnd, FrontEnds


class Verdict(enum.Enum):
    """The outcome of an adoption."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    # The stream to the front end ended first: it may have accepted or not. It recovers the request in either
    # case.
    UNKNOWN = "unknown"


class Adoption:
    """Ask a front end to adopt once.

    Between the request and the reply the import can neither be cancelled nor time out: only the end of the
    stream to the front end decides otherwise, and a front end that does not reply is disconnected.
    """

    def __init__(self, front_ends: FrontEnds, front_end: FrontEnd) -> None:
        self._front_ends = front_ends
        self._front_end = front_end
        self._reply: worker_pb2.AdoptReply | None = None
        # Set once there is a reply or there will be none.
        self._settled = asyncio.Event()

    @property
    def gone(self) -> bool:
        """Return whether the front end refused because the request has ended."""
        return self._reply is not None and self._reply.gone

    def answer(self, reply: worker_pb2.AdoptReply) -> None:
        """Take the front end's reply."""
        self._reply = self._reply or reply
        self._settled.set()

    async def ask(self, adopt: worker_pb2.Adopt, timeout_s: float) -> tuple[Verdict, str]:
        """Return the verdict, and the reason if it is not ACCEPTED."""
        if not self._front_end.send(worker_pb2.AttachDown(adopt=adopt)):
            # Not sent, so it cannot have been accepted.
            return Verdict.REFUSED, "the front end is gone"
        watch = asyncio.create_task(self._watch(), name="adoption")
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            pass
        finally:
            watch.cancel()
        if self._reply is not None:
            if self._reply.accepted:
                return Verdict.ACCEPTED, ""
            return Verdict.REFUSED, self._reply.reason or "refused by the front end"
        if not self._front_end.closed.is_set():
            self._front_end.disconnect(f"did not answer an adoption within {timeout_s:g} s")
            self._front_ends.detach(self._front_end)
        return Verdict.UNKNOWN, f"the front end is gone: {self._front_end.reason}"

    async def _watch(self) -> None:
        await self._front_end.closed.wait()
        self._settled.set()
