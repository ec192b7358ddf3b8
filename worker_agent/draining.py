"""How a worker is emptied: by an operator who drains it, or because it was told to stop.

What runs is moved by live migration, which the scheduler orders once it hears that the worker drains. What
has no KV here is handed back to be placed elsewhere. A worker that stops hands back what is left in the end,
so that it is emptied without a scheduler, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.client import StoreUnavailable
from tailrace.store.registration import Registration
from tailrace.v1 import worker_pb2
from worker_agent.carried import CarriedRequests
from worker_agent.frontends import FrontEnds
from worker_agent.hand_backs import HandBacks
from worker_agent.migration.exports import Exports
from worker_agent.migration.imports import Imports

log = logging.getLogger(__name__)

# Seconds between two looks at what is left.
_POLL_S: Final = 0.1
# For etcd to take the news.
_ANNOUNCE_S: Final = 3.0
# For front ends to place what is handed back last.
HANDOVER_S: Final = 5.0


class Draining:
    """One worker's. `run` serves an operator's drain; `stop` is the worker's own."""

    def __init__(
        self,
        instance_id: str,
        drained: Callable[[], bool],
        hand_backs: HandBacks,
        carried: CarriedRequests,
        exports: Exports,
        imports: Imports,
        front_ends: FrontEnds,
        hello: worker_pb2.WorkerHello,
    ) -> None:
        """`drained()`: whether an operator drains the instance. `hello`: for front ends that attach later."""
        self._instance_id = instance_id
        self._drained = drained
        self._hand_backs = hand_backs
        self._carried = carried
        self._exports = exports
        self._imports = imports
        self._front_ends = front_ends
        self._hello = hello
        self._stopping = False

    @property
    def active(self) -> bool:
        """Whether nothing new should come here."""
        return self._stopping or self._drained()

    async def run(self) -> None:
        """Hand back what has no KV here for as long as the instance drains; until cancelled."""
        while True:
            if self.active:
                self._hand_backs.without_kv(_now_s())
            await asyncio.sleep(_POLL_S)

    async def stop(
        self,
        timeout_s: float,
        set_serving: Callable[[bool], Awaitable[None]],
        registration: Registration,
        record: InstanceRecord,
    ) -> None:
        """Tell everybody, and wait until nothing is left here; after `timeout_s`, hand back what is.

        Takes at most HANDOVER_S and a few seconds more than `timeout_s`.
        """
        self._stopping = self._hello.draining = True
        for front_end in self._front_ends:
            front_end.send(worker_pb2.AttachDown(draining=worker_pb2.Draining()))
        self._imports.refuse("the worker is stopping")
        await set_serving(False)
        await self._announce(registration, record)
        log.info("%s: %d requests to hand over", self._instance_id, len(self._carried))
        if await self._emptied(timeout_s):
            return
        log.warning("%s: %d requests left after %g s", self._instance_id, len(self._carried), timeout_s)
        self._hand_backs.everything(_now_s())
        if not await self._emptied(HANDOVER_S):
            log.warning("%s: %d requests found no other instance", self._instance_id, len(self._carried))

    async def _announce(self, registration: Registration, record: InstanceRecord) -> None:
        """Attached front ends know already; the scheduler and the others learn it from etcd."""
        value = msgspec.json.encode(msgspec.structs.replace(record, draining=True))
        try:
            async with asyncio.timeout(_ANNOUNCE_S):
                await registration.update(value)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("%s: etcd does not know that it drains: %s", self._instance_id, error or "too slow")

    async def _emptied(self, timeout_s: float) -> bool:
        """Until no request and no migration is left here; False: after that time some are."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._carried) or len(self._exports) or len(self._imports):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True


def _now_s() -> float:
    return asyncio.get_running_loop().time()
