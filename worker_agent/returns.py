"""Ask front ends to place requests elsewhere, where they are recomputed.

While the worker drains these are all requests without KV here; otherwise prompts that the scheduler wants
elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Final

from tailrace.v1 import worker_pb2
from worker_agent.engine.base import EngineStats, RequestKey
from worker_agent.frontends import FrontEnds
from worker_agent.running_requests import RunningRequests

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
