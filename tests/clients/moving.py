"""Migrate every running request of a fleet again and again, and kill one worker once, while a client runs."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import grpc

from examples import fleet as admin
from tailrace.v1 import admin_pb2, types_pb2
from tests.harness.fleet import Fleet, request_had_ended

_POLL_S: Final = 0.05
_AT_A_TIME: Final = 4


@dataclass(slots=True)
class Disturbed:
    """What was done to a client's requests."""

    # Committed migrations by request.
    moves: Counter[str] = field(default_factory=Counter)
    # Why others failed, except because the request ended first.
    failed: list[str] = field(default_factory=list)
    kills: int = 0
    # Requests that ran on the killed worker.
    interrupted: int = 0


class Mover:
    """Moves requests and kills a worker during the block, in a thread.

    A request is moved at most `max_moves` times, so that it also makes progress. The worker is killed when a
    request runs on it and `kill_after` migrations are done, and restarted at once.
    """

    def __init__(self, fleet: Fleet, max_moves: int = 3, kill_after: int = 3) -> None:
        self.done = Disturbed()
        self._fleet = fleet
        self._admin = admin.Fleet(fleet.admin())
        self._max_moves = max_moves
        self._kill_after = kill_after
        # Requests with a migration that was ordered here.
        self._moving: set[str] = set()
        self._killed = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(_AT_A_TIME)
        self._thread = threading.Thread(target=self._run, name="mover")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                requests = [r for r in self._admin.requests() if r.output_tokens]
                instances = self._admin.instances()
            except grpc.RpcError:
                continue
            if not self._killed and requests and self.done.moves.total() >= self._kill_after:
                self._kill(requests)
                continue
            for request in requests:
                self._order(request, instances)

    def _kill(self, requests: list[admin_pb2.RequestInfo]) -> None:
        """Kill the worker with the most requests and restart it."""
        ((self._killed, count),) = Counter(r.instance_id for r in requests).most_common(1)
        self._fleet.processes[self._killed].kill()
        self.done.kills += 1
        self.done.interrupted = count
        self._fleet.restart(self._killed)

    def _order(self, request: admin_pb2.RequestInfo, instances: list[str]) -> None:
        name = request.request_id
        with self._lock:
            if request.migrating or name in self._moving or self.done.moves[name] >= self._max_moves:
                return
            others = [each for each in instances if each != request.instance_id]
            if not others:
                return
            self._moving.add(name)
        # Not always the same one.
        target = others[self.done.moves.total() % len(others)]
        self._pool.submit(self._move, name, target)

    def _move(self, request_id: str, target: str) -> None:
        try:
            record = self._admin.migrate(request_id, target, "client")
        except grpc.RpcError as error:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
            ended = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND
        else:
            reason, ended = record.error, request_had_ended(record)
            if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
                with self._lock:
                    self.done.moves[request_id] += 1
                reason = ""
        with self._lock:
            self._moving.discard(request_id)
            if reason and not ended:
                self.done.failed.append(reason)
