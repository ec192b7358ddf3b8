"""Answer front ends that ask whether this worker still has their requests.

A front end asks about a stream without a token for long. The engine's state counts, not the worker's own
records: what the engine does not have does not run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from tailrace.service.tasks import cancel, run_once
from tailrace.telemetry.incidents import loop_named
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import Engine, Held, RequestKey
from worker_agent.engine.errors import EngineRefusal
from worker_agent.frontends import FrontEnd
from worker_agent.running_requests import RunningRequests

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("held queries")


class HeldQueries:
    """Answer one query per front end at a time; the front end repeats it for what is still in doubt."""

    def __init__(
        self,
        engine: Engine,
        running: RunningRequests,
        exporting: Callable[[RequestKey], bool],
        importing: Callable[[RequestKey], bool],
        give_up: Callable[[RequestKey], None],
    ) -> None:
        """`exporting`, `importing` return whether a migration of the request from or to here is in progress.

        `give_up` frees whatever the worker keeps of a request.
        """
        self._engine = engine
        self._running = running
        self._exporting = exporting
        self._importing = importing
        self._give_up = give_up
        self._answering: dict[int, asyncio.Task[None]] = {}

    def answer(self, front_end: FrontEnd, query: worker_pb2.HeldQuery) -> None:
        """Answer once the engine has listed its requests."""
        client = front_end.client
        if client not in self._answering:
            task = run_once(_LOOP, partial(self._answer, front_end, query))
            self._answering[client] = task
            task.add_done_callback(lambda _: self._answering.pop(client))

    async def close(self) -> None:
        """Cancel pending answers."""
        await cancel(*self._answering.values())

    async def _answer(self, front_end: FrontEnd, query: worker_pb2.HeldQuery) -> None:
        keys = {
            RequestKey(front_end.client, handle): epoch
            for handle, epoch in zip(query.handles, query.epochs, strict=False)
        }
        # One that arrives meanwhile may be neither where the engine looked nor on its way any more.
        moving = {key for key in keys if self._importing(key) or self._exporting(key)}
        try:
            held = await self._engine.find_held(list(keys))
        except EngineRefusal as refusal:
            # The engine has failed or is in a long step; both are reported in other ways.
            log.debug("no answer to front end %s: %s", front_end.frontend_id, refusal)
            return
        missing = {
            key: epoch
            for key, epoch in keys.items()
            if key not in moving and not self._has(key, epoch, held.get(key))
        }
        reply = worker_pb2.HeldReply(
            missing_handles=[key.handle for key in missing], missing_epochs=list(missing.values())
        )
        front_end.send(worker_pb2.AttachDown(held_reply=reply))
        for key, epoch in missing.items():
            running = self._running.get(key)
            if running is not None and running.epoch == epoch:
                log.error("%s was lost by this worker", running.request_id)
                self._give_up(key)

    def _has(self, key: RequestKey, epoch: int, held: Held | None) -> bool:
        if self._importing(key):
            return True
        if held is None or held.epoch != epoch:
            return False
        # Only the export that paused it can resume it.
        return not held.paused or self._exporting(key)
