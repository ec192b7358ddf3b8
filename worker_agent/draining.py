"""Empty a worker: when an operator drains it, or when it is told to stop.

Running requests are moved by live migration, which the scheduler orders once it learns that the worker
drains. What has no KV here is returned to be placed elsewhere. A worker that stops finally returns
whatever is left, so that it is emptied without a scheduler as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.client import StoreUnavailable
from tailrace.store.registration import Registration
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import EngineStats, RequestKey
from worker_agent.frontends import FrontEnds
from worker_agent.migration.source import Exports
from worker_agent.migration.target import Imports
from worker_agent.running_requests import RunningRequests

log = logging.getLogger(__name__)

# Seconds after which a front end that found no other instance is asked again.
RETRY_S: Final = 2.0


class Returns:
    """Return requests to their front ends; one that finds no other instance leaves its request here."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        running: RunningRequests,
        front_ends: FrontEnds,
        exporting: Callable[[RequestKey], bool],
    ) -> None:
        """`exporting(key)` returns whether a migration of the request from here is open."""
        self._stats = stats
        self._running = running
        self._front_ends = front_ends
        self._exporting = exporting
        # When each was last returned, in seconds of the caller's clock.
        self._returned_s: dict[RequestKey, float] = {}

    def return_without_kv(self, now_s: float) -> None:
        """Return requests without KV here: waiting prompts, and preempted requests whose KV was
        dropped."""
        idle = {
            request.request_id
            for request in self._stats().requests
            if request.state == "waiting" or (request.state == "preempted" and not request.kv_on_host)
        }
        self._return_named(idle, now_s)

    def return_prompts(self, request_ids: Collection[str], now_s: float) -> int:
        """Return those of the requests that wait here without a token; return how many."""
        requested = set(request_ids)
        return self._return_named(
            {
                request.request_id
                for request in self._stats().requests
                if request.request_id in requested
                and request.state == "waiting"
                and not request.output_tokens
            },
            now_s,
        )

    def return_all(self, now_s: float) -> None:
        """Return everything that is left here, including requests that are being migrated."""
        self._return([key for key, _ in self._running.items()], now_s)

    def _return_named(self, request_ids: Collection[str], now_s: float) -> int:
        if not request_ids:
            return 0
        return self._return(
            [
                key
                for key, running in self._running.items()
                if running.request_id in request_ids and not self._exporting(key)
            ],
            now_s,
        )

    def _return(self, keys: Collection[RequestKey], now_s: float) -> int:
        """Return requests that were not returned a moment ago; return how many."""
        running = dict(self._running.items())
        self._returned_s = {key: at_s for key, at_s in self._returned_s.items() if key in running}
        messages: dict[int, worker_pb2.Returned] = defaultdict(worker_pb2.Returned)
        for key in keys:
            if now_s - self._returned_s.get(key, -RETRY_S) < RETRY_S:
                continue
            self._returned_s[key] = now_s
            messages[key.client].handles.append(key.handle)
            messages[key.client].epochs.append(running[key].epoch)
        for client, message in messages.items():
            front_end = self._front_ends.by_client(client)
            if front_end is not None:
                front_end.send(worker_pb2.AttachDown(returned=message))
        return sum(len(message.handles) for message in messages.values())


# Seconds between two checks of what is left.
_POLL_S: Final = 0.1
# Time to write the draining state to etcd.
_ANNOUNCE_S: Final = 3.0
# Time for front ends to place what is returned last.
HANDOVER_S: Final = 5.0


class Draining:
    """Drain one worker. `run` serves an operator's drain; `stop` is used when the worker itself stops."""

    def __init__(
        self,
        instance_id: str,
        drained: Callable[[], bool],
        returns: Returns,
        running: RunningRequests,
        exports: Exports,
        imports: Imports,
        front_ends: FrontEnds,
        hello: worker_pb2.WorkerHello,
    ) -> None:
        """`drained()` returns whether an operator drains the instance. `hello`: for front ends that attach
        later."""
        self._instance_id = instance_id
        self._drained = drained
        self._returns = returns
        self._running = running
        self._exports = exports
        self._imports = imports
        self._front_ends = front_ends
        self._hello = hello
        self._stopping = False

    @property
    def active(self) -> bool:
        """Return whether no new requests should come here."""
        return self._stopping or self._drained()

    async def run(self) -> None:
        """Return requests without KV while the instance drains; run until cancelled."""
        while True:
            if self.active:
                self._returns.return_without_kv(_now_s())
            await asyncio.sleep(_POLL_S)

    async def stop(
        self,
        timeout_s: float,
        set_serving: Callable[[bool], Awaitable[None]],
        registration: Registration,
        record: InstanceRecord,
    ) -> None:
        """Announce the stop and wait until nothing is left here; after `timeout_s`, return what is.

        Takes at most a few seconds more than HANDOVER_S and `timeout_s` together.
        """
        self._stopping = self._hello.draining = True
        for front_end in self._front_ends:
            front_end.send(worker_pb2.AttachDown(draining=worker_pb2.Draining()))
        self._imports.refuse("the worker is stopping")
        await set_serving(False)
        await self._announce(registration, record)
        log.info("%s: %d requests to hand over", self._instance_id, len(self._running))
        if await self._emptied(timeout_s):
            return
        log.warning("%s: %d requests left after %g s", self._instance_id, len(self._running), timeout_s)
        self._returns.return_all(_now_s())
        if not await self._emptied(HANDOVER_S):
            log.warning("%s: %d requests found no other instance", self._instance_id, len(self._running))

    async def _announce(self, registration: Registration, record: InstanceRecord) -> None:
        """Publish the draining state in etcd for the scheduler; attached front ends know already."""
        value = msgspec.json.encode(msgspec.structs.replace(record, draining=True))
        try:
            async with asyncio.timeout(_ANNOUNCE_S):
                await registration.update(value)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("%s: cannot publish the drain in etcd: %s", self._instance_id, error or "timeout")

    async def _emptied(self, timeout_s: float) -> bool:
        """Wait until no request and no migration is left here; return False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._running) or len(self._exports) or len(self._imports):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True


def _now_s() -> float:
    return asyncio.get_running_loop().time()
