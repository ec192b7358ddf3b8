"""Drain instances: migrate their requests away, and report the progress to operators."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from tailrace.actions import ORDERED_MAX, Migrate
from tailrace.cluster import InstanceState, InstanceView, Phase, RequestState, RequestView
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.runner import Executor
from tailrace.v1 import admin_pb2

REASON: Final = "drain"
_POLL_S: Final = 0.25
# A request that could not be moved is retried after this long, doubling up to the maximum.
_RETRY_FIRST_S: Final = 2.0
_RETRY_MAX_S: Final = 16.0


@dataclass(slots=True)
class _Attempts:
    count: int
    last_s: float


class Drainer:
    """Migrate each request off draining instances. Waiting prompts have no KV: their worker hands them
    back."""

    def __init__(self, state: ReportedCluster, executor: Executor, leading: asyncio.Event) -> None:
        self._state = state
        self._executor = executor
        self._leading = leading
        self._attempts: dict[tuple[str, str], _Attempts] = {}

    async def run(self) -> None:
        """Run until cancelled; acts only while this scheduler leads."""
        while True:
            await self._leading.wait()
            self.run_once(time.monotonic())
            await asyncio.sleep(_POLL_S)

    def run_once(self, now_s: float) -> None:
        """Start the migrations that are due."""
        view = self._state.view()
        draining = [i for i in view.instances.values() if i.state is InstanceState.DRAINING]
        # Tokens sent to each target in this pass, and migrations, so that one instance's requests do not all
        # choose the same target.
        sent: Counter[str] = Counter()
        ordered: Counter[str] = Counter()
        present: set[tuple[str, str]] = set()
        for instance in draining:
            moves: list[Migrate] = []
            requests = self._state.requests_on(instance.instance_id)
            present.update((request.request_id, request.instance_id) for request in requests)
            # Prefer active instances that can take the KV; if there are none, those that can recompute it.
            targets = self._state.view_for_request(instance.instance_id, now_s).placeable()
            targets = targets or self._state.view_for_replay(instance.instance_id).placeable()
            # Beyond, targets are chosen when their turn is near.
            allowed = ORDERED_MAX - sum(request.migrating for request in requests)
            for request in requests:
                if len(moves) >= allowed:
                    break
                if not self._due(request, now_s):
                    continue
                near = [i for i in targets if i.migrations_in + ordered[i.instance_id] < ORDERED_MAX]
                target = _least_utilized(near, sent)
                if target is not None:
                    sent[target] += request.context_tokens
                    ordered[target] += 1
                    moves.append(Migrate(request.request_id, instance.instance_id, target, REASON))
                    self._record_attempt(request, now_s)
            self._executor.submit(moves, REASON)
        self._attempts = {key: attempts for key, attempts in self._attempts.items() if key in present}

    def _due(self, request: RequestView, now_s: float) -> bool:
        if request.migrating or request.phase is Phase.PREFILL or request.state is RequestState.WAITING:
            return False
        attempts = self._attempts.get((request.request_id, request.instance_id))
        if attempts is None:
            return True
        pause_s: float = min(_RETRY_FIRST_S * 2 ** (attempts.count - 1), _RETRY_MAX_S)
        return now_s - attempts.last_s >= pause_s

    def _record_attempt(self, request: RequestView, now_s: float) -> None:
        attempts = self._attempts.setdefault((request.request_id, request.instance_id), _Attempts(0, now_s))
        attempts.count += 1
        attempts.last_s = now_s


def _least_utilized(targets: Iterable[InstanceView], sent: Counter[str]) -> str | None:
    def utilization(instance: InstanceView) -> tuple[float, str]:
        tokens = instance.kv_used_tokens + instance.prefill_backlog_tokens + sent[instance.instance_id]
        return tokens / max(1, instance.kv_capacity_tokens), instance.instance_id

    best = min(targets, key=utilization, default=None)
    return None if best is None else best.instance_id


_PROGRESS_POLL_S: Final = 0.2


async def drain_events(state: ReportedCluster, instance_id: str) -> AsyncIterator[admin_pb2.DrainEvent]:
    """Yield an event at each change, the last one when the instance is empty or has left the cluster.

    The drain is in force already, on all schedulers. Raise AdminError ABORTED if it is undrained meanwhile.
    """
    began_s = time.monotonic()
    last_sent: tuple[int, int, bool] | None = None
    while (tracked := state.tracked(instance_id)) is not None:
        requests = state.requests_on(instance_id)
        moving = sum(request.migrating for request in requests)
        view = state.view().instances[instance_id]
        suspect = view.state is InstanceState.SUSPECT
        if view.state is InstanceState.ACTIVE:
            raise AdminError(
                grpc.StatusCode.ABORTED, f"{instance_id} takes new requests again: somebody undrained it"
            )
        if not requests and not suspect and tracked.shows_placed_before(began_s):
            yield admin_pb2.DrainEvent(remaining=0, message=f"{instance_id} is empty", done=True)
            return
        if (len(requests), moving, suspect) != last_sent:
            last_sent = (len(requests), moving, suspect)
            yield admin_pb2.DrainEvent(remaining=len(requests), message=_message(instance_id, *last_sent))
        await asyncio.sleep(_PROGRESS_POLL_S)
    yield admin_pb2.DrainEvent(remaining=0, message=f"{instance_id} has left the cluster", done=True)


def _message(instance_id: str, remaining: int, moving: int, suspect: bool) -> str:
    doubt = "; it does not report" if suspect else ""
    return f"{instance_id}: {remaining} requests left, {moving} moving{doubt}"
